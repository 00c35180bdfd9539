"""Reading prompts from files and writing results: one line per prompt, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from deepinfer_jax.outputs import LogprobDict, RequestOutput
    from deepinfer_jax.text.tokenizer import Tokenizer

_KEYS = ("id", "prompt", "prompt_token_ids", "messages", "sampling_params")


@dataclass(frozen=True)
class Prompt:
    """One request as it was given. Exactly one of text, token_ids and messages is set."""

    source: str
    """Where it stands ("FILE:12"), for messages."""
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: Any = None
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
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    numbered = [
        (f"{path}:{n}", line.rstrip("\r")) for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not numbered:
        raise ValueError(f"{path}: no prompts in it")
    return [
        Prompt(source, text=line) if suffix == ".txt" else _parse_object(source, line)
        for source, line in numbered
    ]


def _parse_object(source: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not JSON: {error}") from error
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
        raise ValueError(f"{source}: prompt must be a string, got {value['prompt']!r}")
    ids = value.get("prompt_token_ids", [])
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ValueError(f"{source}: prompt_token_ids must be a list of integers")
    if not isinstance(value.get("messages", []), list):
        raise ValueError(f"{source}: messages must be a list")
    if not isinstance(value.get("sampling_params", {}), dict):
        raise ValueError(f"{source}: sampling_params must be an object")


def write_results(
    stream: TextIO, prompts: Iterable[Prompt], outputs: Iterable[RequestOutput], *, as_json: bool
) -> None:
    """One line per prompt: JSON, or the text with its line breaks written as \\n (of the first
    completion)."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if as_json:
            stream.write(
                json.dumps(result_record(index, prompt, output), ensure_ascii=False) + "\n"
            )
        else:
            stream.write(
                output.outputs[0]
                .text.replace("\\", "\\\\")
                .replace("\r", "\\r")
                .replace("\n", "\\n")
                + "\n"
            )


def result_record(index: int, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """What a line of a .jsonl result holds; log-probabilities only where they were asked for."""
    record: dict[str, Any] = {"index": index, "request_id": output.request_id}
    if prompt.id is not None:
        record["id"] = prompt.id
    for key, value in (("prompt", prompt.text), ("messages", prompt.messages)):
        if value is not None:
            record[key] = value
    record["prompt_token_ids"] = list(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if d is None else _logprobs(d) for d in output.prompt_logprobs
        ]
    record["outputs"] = [_completion(c) for c in output.outputs]
    return record


def _completion(completion: Any) -> dict[str, Any]:
    record = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = [_logprobs(d) for d in completion.logprobs]
    return record


def _logprobs(entries: LogprobDict) -> list[dict[str, Any]]:
    return [
        {"token_id": i, "logprob": p.logprob, "rank": p.rank, "token": p.decoded_token}
        for i, p in entries.items()
    ]
