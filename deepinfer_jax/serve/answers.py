"""Parts of the API's answers: choices, usage, log-probabilities, and the events of a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from deepinfer_jax.outputs import CompletionOutput, Logprob, LogprobDict, RequestOutput
from deepinfer_jax.serve.errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()


def head(kind: str, model: str, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(outputs: Sequence[RequestOutput], tokens: int) -> dict[str, Any]:
    """outputs: the last one of every prompt; tokens: generated in all."""
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def check_ended(output: RequestOutput, limit: int) -> None:
    """Raises ApiError for what is an error to a client: too long a prompt, an engine's failure."""
    for c in output.outputs:
        if c.finish_reason == "prompt_length_exceeded":
            raise ApiError(
                f"this model's context holds {limit} tokens, the prompt has"
                f" {len(output.prompt_token_ids)}",
                param="messages" if output.prompt is None else "prompt",
                code="context_length_exceeded",
            )
        if c.finish_reason == "error":
            raise ApiError(f"the request failed: {c.stop_reason}", status=500)
        if c.finish_reason == "abort":
            raise ApiError("the request was aborted", status=503)


def text_of(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def completion_logprobs(
    tokens: Sequence[int],
    entries: Sequence[LogprobDict | None],
    top: int,
    offset: int,
    decode: Callable[[int], str],
) -> dict[str, Any]:
    """The completions API's form. entries: per token, None where there is none (the first of a
    prompt, whose text `decode` gives); offset: characters of the text before it."""
    names, values, tops, offsets = [], [], [], []
    for token, entry in zip(tokens, entries, strict=True):
        mine = None if entry is None else entry[token]
        name = decode(token) if mine is None else text_of(token, mine)
        names.append(name)
        values.append(None if mine is None else _finite(mine.logprob))
        tops.append(None if entry is None else _tops(entry, top))
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _tops(entry: LogprobDict, top: int) -> dict[str, float]:
    best = sorted(entry.items(), key=lambda kv: -kv[1].logprob)[: max(top, 1)]
    return {text_of(t, e): _finite(e.logprob) for t, e in best}


def _finite(value: float) -> float:
    """JSON has no infinity: a banned token's log-probability is the lowest float32."""
    return max(value, -3.4028235e38)


def chat_logprobs(c: CompletionOutput, top: int) -> dict[str, Any] | None:
    """The chat API's form."""
    if c.logprobs is None:
        return None

    def item(token: int, entry: Logprob) -> dict[str, Any]:
        text = text_of(token, entry)
        data = list(text.encode(errors="replace"))
        return {"token": text, "logprob": _finite(entry.logprob), "bytes": data}

    content = []
    for token, entry in zip(c.token_ids, c.logprobs, strict=True):
        best = sorted(entry.items(), key=lambda kv: -kv[1].logprob)[:top]
        content.append(item(token, entry[token]) | {"top_logprobs": [item(t, e) for t, e in best]})
    return {"content": content}


async def merged(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncIterator[Any]:
    """(index, output) of several prompts' outputs as they come; closing it closes them all."""

    async def closing(stream: AsyncIterator[RequestOutput]) -> None:
        await stream.aclose()  # type: ignore[attr-defined]

    waiting = {asyncio.ensure_future(anext(s, None)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                output = task.result()
                if output is not None:
                    waiting[asyncio.ensure_future(anext(streams[i], None))] = i
                    yield i, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(closing(s) for s in streams), return_exceptions=True)
