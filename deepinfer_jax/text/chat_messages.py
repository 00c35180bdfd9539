"""Conversations as chat templates take them: plain values, checked, with the names and shapes that
transformers 5 gives them.

Chat templates come with checkpoints and see nothing but plain JSON values: an object with methods
could let them do more than print.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first or, of gpt-oss, the second."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part that is text -> the key that holds it."""
MAX_DEPTH = 100

Message = dict[str, Any]


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value made of dict, list, str, int, float, bool and None alone.

    Dataclasses, pydantic models and NumPy numbers become what they hold. Raises ValueError naming
    `where` for anything else and for values nested over MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} holds {value!r}, which is no JSON number")
        return float(value)
    if isinstance(value, np.generic):
        return plain(value.item(), where, depth)
    if isinstance(value, Mapping):
        if odd := [k for k in value if not isinstance(k, str)]:
            raise ValueError(f"{where} has the key {odd[0]!r}; keys must be text")
        return {str(k): plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain(fields, where, depth)
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump(), where, depth)
    raise ValueError(f"{where} must be plain JSON values, got a {type(value).__name__}")


def template_messages(messages: Any) -> list[Message]:
    """The conversation as a fresh list of plain dicts. Raises ValueError naming the message.

    Keys whose value is None are left out (clients send content=None beside tool calls, which many
    templates would print). Content parts must be text: models here take nothing else.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}"
        )
    result = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not result:
        raise ValueError("messages must hold at least one message, got []")
    return result


def _message(message: Any, where: str) -> Message:
    value = message if isinstance(message, str) else plain(message, where)
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ValueError(f"{where} must be a mapping with a 'role', got {message!r}")
    value = {k: v for k, v in value.items() if v is not None}
    content = value.get("content", "")
    if isinstance(content, list):
        value["content"] = [_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)]
    elif not isinstance(content, str):
        raise ValueError(f"{where}.content must be text or a list of parts, got {content!r}")
    _check_calls(value, where)
    reasoning = next((value[k] for k in REASONING if k in value), None)
    if reasoning is None:
        return value
    return {"thinking": reasoning, **value, "reasoning_content": reasoning}


def _part(part: Any, where: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise ValueError(f"{where} must be text or a mapping, got {part!r}")
    key = TEXT_PARTS.get(part.get("type", "text"))
    if key is None:
        raise ValueError(
            f"{where} has type {part.get('type')!r}; models here take text only: {list(TEXT_PARTS)}"
        )
    if not isinstance(part.get(key), str):
        raise ValueError(f"{where} must have its text under {key!r}, got {part!r}")
    return {**part, "type": "text", "text": part[key]}


def _check_calls(message: Message, where: str) -> None:
    """Arguments of tool calls are objects, or JSON texts of objects, as OpenAI's API has them."""
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}.tool_calls must be a list of mappings, got {calls!r}")
    named = [(c.get("function"), f"{where}.tool_calls[{i}].function") for i, c in enumerate(calls)]
    for call, place in [*named, (message.get("function_call"), f"{where}.function_call")]:
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            _check_arguments(call["arguments"], f"{place}.arguments")


def _check_arguments(text: str, where: str) -> None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {text!r}")


class OpenEnd:
    """The last message, left open for the model to continue (`continue_final_message`).

    A mark behind its text says where to cut what the template makes of it: everything that closes
    the message goes. field: which text of the message, "content" unless a name is given.
    """

    MARK = "CONTINUE_FINAL_MESSAGE_TAG "

    def __init__(self, messages: list[Message], field: bool | str, source: str) -> None:
        """Puts the mark into `messages`. Raises ValueError where there is nothing to continue."""
        self.field = field if isinstance(field, str) else "content"
        text = messages[-1].get(self.field)
        if text is None:
            raise ValueError(f"the last message has no {self.field!r} to continue")
        names = [self.field]
        if self.field in REASONING:
            names = [n for n in REASONING if messages[-1].get(n) == text]
        if not any(name in source for name in names):
            raise ValueError(f"the chat template does not read the {self.field!r} to continue")
        if isinstance(text, list):
            part = next((p for p in reversed(text) if p.get("text") is not None), None)
            if part is None:
                raise ValueError(f"the last message's {self.field!r} has no text to continue")
            self.text, part["text"] = part["text"], part["text"] + self.MARK
        else:
            self.text = text
            messages[-1] |= dict.fromkeys(names, text + self.MARK)

    def cut(self, rendered: str) -> str:
        """What was rendered, up to the end of the last message's text."""
        mark = self.MARK.strip()
        if mark not in rendered or self.text.strip() not in rendered:
            raise ValueError(
                "the chat template does not show the last message as it is, so that it cannot be"
                " continued"
            )
        place = rendered.rindex(mark)
        whole = rendered.startswith(self.MARK, place)
        return rendered[:place] if whole else rendered[:place].rstrip()
