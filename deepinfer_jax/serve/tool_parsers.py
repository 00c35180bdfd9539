"""Tool calls in a model's text, by family, parsed while the text arrives.

A parser holds back what may become the start of a call and gives the rest as content. A call that
does not parse is content, character for character: nothing a model wrote is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """arguments: JSON text, as the API has it."""

    name: str
    arguments: str


@dataclass
class Parsed:
    """What new text turned out to be."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


CallReader = Callable[[str], list[ToolCall] | None]
"""The text between the marks -> its calls; None where it is none."""


def _call(value: object) -> ToolCall | None:
    """{"name": ..., "arguments" or "parameters": {...}} -> the call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(text: str) -> list[ToolCall] | None:
    """One call or a list of calls as JSON."""
    value = _loads(text)
    calls = [_call(v) for v in (value if isinstance(value, list) else [value])]
    return None if not calls or None in calls else calls  # type: ignore[return-value]


def read_llama3(text: str) -> list[ToolCall] | None:
    """Calls as JSON, separated by semicolons."""
    decoder, at, calls = json.JSONDecoder(), 0, []
    while at < len(text):
        if text[at] in " \t\r\n;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        call = _call(value)
        if call is None:
            return None
        calls.append(call)
    return calls or None


_DS_CALL, _DS_SEP, _DS_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def read_deepseek(text: str) -> list[ToolCall] | None:
    """`begin [function sep] name sep|newline arguments end`, arguments fenced as JSON or bare."""
    calls = []
    for part in text.split(_DS_CALL)[1:]:
        body, end, rest = part.partition(_DS_END)
        if not end or rest.strip():
            return None
        head, _, tail = body.partition(_DS_SEP)
        if head == "function":  # V3 and R1: the kind first, then name, newline, fenced arguments
            head, _, tail = tail.partition("\n")
        arguments = tail.strip().removeprefix("```json").removesuffix("```").strip()
        if not head.strip() or not isinstance(_loads(arguments), dict):
            return None
        calls.append(ToolCall(head.strip(), arguments))
    return calls or None


@dataclass(frozen=True)
class Family:
    """start, end: marks around calls; an empty end means the end of the text.

    bare: an answer that begins with this is a call without a mark. special: the marks are special
    tokens, which the text must keep.
    """

    start: str
    end: str
    read: CallReader
    bare: str = ""
    special: bool = False


FAMILIES: dict[str, Family] = {
    "hermes": Family("<tool_call>", "</tool_call>", read_json),
    "llama3": Family("<|python_tag|>", "", read_llama3, bare="{", special=True),
    "deepseek": Family(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", read_deepseek, special=True
    ),
}


def family_of(template: str) -> str | None:
    """The family whose marks a chat template writes; None where it writes none of them."""
    if "<tool_call>" in template:
        return "hermes"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek"
    return "llama3" if "<|python_tag|>" in template or "python_tag" in template else None


class ToolParser:
    """One answer's text, piece by piece. White space around calls is none of the content."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._held = ""
        self._inside = False
        self._begun = False  # something but white space has come
        self._called = False
        self._between = True  # only white space has come since the start, or since a call
        self._space = ""  # what of that stood before the mark of the call we are in

    def feed(self, text: str) -> Parsed:
        """More of the text; what of it is decided."""
        self._held += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """The text has ended."""
        f, held, self._held = self._family, self._held, ""
        if not self._inside:
            return Parsed(content="" if self._called and not held.strip() else held)
        bare = bool(f.bare) and held.startswith(f.bare)
        calls = f.read(held) if not f.end or bare else None
        if calls is not None:
            return Parsed(calls=calls)
        return Parsed(content=self._space + (held if bare else f.start + held))

    def _advance(self, parsed: Parsed) -> bool:
        """Decides about the front of what is held; False: more text is needed."""
        return self._in_call(parsed) if self._inside else self._in_content(parsed)

    def _in_content(self, parsed: Parsed) -> bool:
        f, held = self._family, self._held
        if not self._begun and held.strip():
            self._begun, front = True, held.lstrip()
            if f.bare and front.startswith(f.bare):
                self._enter(held[: len(held) - len(front)], front)
                return True
        before, mark, after = held.partition(f.start)
        if mark:
            only_space = self._between and not before.strip()
            parsed.content += "" if only_space else before
            self._enter(before if only_space else "", after)
            return True
        keep = next(n for n in range(len(f.start), -1, -1) if held.endswith(f.start[:n]))
        decided = held[: len(held) - keep]
        if self._between and not decided.strip():
            return False
        self._between = False
        parsed.content += decided
        self._held = held[len(held) - keep :]
        return False

    def _enter(self, space: str, after: str) -> None:
        self._inside, self._space, self._held = True, space, after

    def _in_call(self, parsed: Parsed) -> bool:
        f = self._family
        if not f.end:
            return False
        body, mark, after = self._held.partition(f.end)
        if not mark:
            return False
        calls = f.read(body)
        if calls is None:
            parsed.content += self._space + f.start + body + f.end
        else:
            parsed.calls += calls
            self._called = True
        self._inside, self._held, self._between = False, after, calls is not None
        return bool(self._held)


class ReasoningParser:
    """Splits `<think>reasoning</think>content`, piece by piece."""

    START, END = "<think>", "</think>"

    def __init__(self, begun: bool) -> None:
        """begun: the prompt has opened the mark already."""
        self._held = ""
        self._state = "inside" if begun else "before"

    def feed(self, text: str) -> tuple[str, str]:
        """More of the text: (reasoning, content) that is decided."""
        self._held += text
        reasoning = ""
        if self._state == "before":
            front = self._held.lstrip()
            if front.startswith(self.START):
                self._state, self._held = "inside", front.removeprefix(self.START).lstrip("\n")
            elif self.START.startswith(front):
                return "", ""
            else:
                self._state = "after"
        if self._state == "inside":
            reasoning, mark, after = self._held.partition(self.END)
            if not mark:
                keep = next(n for n in range(8, -1, -1) if reasoning.endswith(self.END[:n]))
                self._held = reasoning[len(reasoning) - keep :]
                return reasoning[: len(reasoning) - keep], ""
            self._state, self._held = "after", after.lstrip("\n")
        content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "inside" else ("", held)
