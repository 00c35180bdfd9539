"""Reading prompts from files: one line per prompt, as text or as JSON. Everything that can be wrong
with a line is found before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax import json_text

if TYPE_CHECKING:
    from deepinfer_jax.text.tokenizer import Tokenizer

_MAX_TOKEN_ID = 2**31 - 1
_KEYS = ("id", "prompt", "prompt_token_ids", "messages", "sampling_params")


@dataclass(frozen=True)
class Prompt:
    """One request as it was given. Exactly one of text, token_ids and messages is set."""

    source: str
    """Where it stands ("FILE:12"), for messages."""
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of this prompt alone; they override the command's."""

    def tokenize(
        self, tokenizer: Tokenizer | None, *, chat: bool, system: str | None = None
    ) -> list[int]:
        """Token ids of the prompt; `chat` puts a text into the chat template as the user's message.

        Raises ValueError that names the source.
        """
        if self.token_ids is not None:
            return self.token_ids
        if tokenizer is None:
            raise ValueError(
                f"{self.source}: the model has no tokenizer; give prompt_token_ids in a .jsonl file"
            )
        try:
            if self.messages is None and not chat:
                return tokenizer.encode(self.text)
            messages = self.messages or [{"role": "user", "content": self.text}]
            if system is not None and self.messages is None:
                messages = [{"role": "system", "content": system}, *messages]
            return tokenizer.apply_chat_template(messages)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error


def read_prompts(path: str) -> list[Prompt]:
    """Prompts of a .txt file (one per line, empty lines skipped) or a .jsonl file (one object per
    line).

    A JSON object has one of "prompt", "prompt_token_ids" and "messages", and may have "id" and
    "sampling_params". Raises ValueError that names file and line.
    """
    suffix = Path(path).suffix
    if suffix not in (".txt", ".jsonl"):
        raise ValueError(
            f"{path}: prompts are read from .txt (one per line) or .jsonl (one object per line),"
            f" got {suffix or 'no suffix'!r}"
        )
    data = Path(path).read_bytes()
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8: {error}") from error
    numbered = [
        (f"{path}:{n}", line.rstrip("\r")) for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not numbered:
        raise ValueError(f"{path}: no prompts in it")
    prompts = [
        Prompt(source, text=line) if suffix == ".txt" else _parse_object(source, line)
        for source, line in numbered
    ]
    _check_ids(prompts)
    return prompts


def _check_ids(prompts: Sequence[Prompt]) -> None:
    """An id names one result: ValueError for the second line that has it."""
    first: dict[str | int, str] = {}
    for prompt in prompts:
        if prompt.id is not None and first.setdefault(prompt.id, prompt.source) != prompt.source:
            raise ValueError(
                f"{prompt.source}: the id {prompt.id!r} is that of {first[prompt.id]} too"
            )


def _parse_object(source: str, line: str) -> Prompt:
    try:
        value = json_text.loads(line)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if isinstance(value, str):
        return Prompt(source, text=value)
    if not isinstance(value, dict):
        raise ValueError(f"{source}: must be an object or a string, got {type(value).__name__}")
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise ValueError(f"{source}: unknown keys {unknown}; known: {', '.join(_KEYS)}")
    _check(source, value)
    return Prompt(
        source,
        text=value.get("prompt"),
        token_ids=value.get("prompt_token_ids"),
        messages=value.get("messages"),
        id=value.get("id"),
        sampling=value.get("sampling_params", {}),
    )


def _check(source: str, value: Mapping[str, Any]) -> None:
    given = [k for k in ("prompt", "prompt_token_ids", "messages") if k in value]
    if len(given) != 1:
        raise ValueError(
            f"{source}: needs exactly one of prompt, prompt_token_ids and messages, got"
            f" {given or 'none'}"
        )
    if "prompt" in value and not isinstance(value["prompt"], str):
        raise ValueError(f"{source}: prompt must be a string, got {_shown(value['prompt'])}")
    _check_token_ids(source, value.get("prompt_token_ids", [0]))
    _check_messages(source, value.get("messages", [{"role": ""}]))
    given_id = value.get("id")
    if isinstance(given_id, bool) or not isinstance(given_id, str | int | None):
        raise ValueError(f"{source}: id must be a string or an integer, got {_shown(given_id)}")
    if not isinstance(value.get("sampling_params", {}), dict):
        raise ValueError(f"{source}: sampling_params must be an object")


def _check_token_ids(source: str, ids: Any) -> None:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{source}: prompt_token_ids must be a list of integers")
    if not ids:
        raise ValueError(f"{source}: prompt_token_ids is empty")
    outside = next((i for i in ids if not 0 <= i <= _MAX_TOKEN_ID), None)
    if outside is not None:
        raise ValueError(f"{source}: token id {outside} is outside [0, {_MAX_TOKEN_ID}]")


def _check_messages(source: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{source}: messages must be a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{source}: messages[{i}] must be an object with a role, got {_shown(message)}"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
