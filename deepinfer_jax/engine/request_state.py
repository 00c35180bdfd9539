"""A completion as plain values, and back: what another engine needs to go on with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from deepinfer_jax.engine.requests import Completion
from deepinfer_jax.outputs import Logprob, LogprobDict, RequestMetrics
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.detokenizer import IncrementalDetokenizer
from deepinfer_jax.text.tokenizer import Tokenizer


class LogprobEntry(msgspec.Struct, array_like=True, frozen=True):
    """One token of a LogprobDict. JSON has no integer keys, hence a list of these."""

    token: int
    logprob: float
    rank: int | None
    text: str | None


LogprobEntries = list[LogprobEntry]


class RequestState(msgspec.Struct, kw_only=True):
    """Everything an engine needs to go on with a completion, beside its KV.

    Draws are keyed by (seed, position) and penalties are counted from the tokens, so neither needs
    counters here.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]  # SamplingParams.from_dict
    seed: int
    output_token_ids: list[int] = []
    logprobs: list[LogprobEntries] | None = None  # per output token
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[LogprobEntries | None] | None = None
    detokenizer: dict[str, Any] | None = None  # IncrementalDetokenizer.state_dict
    consumed: int = 0  # output tokens given to the detokenizer
    reported: int = 0  # output tokens that were part of a DELTA output
    metrics: RequestMetrics | None = None
    hit_tokens: int = 0
    num_preemptions: int = 0

    @classmethod
    def of(cls, c: Completion) -> RequestState:
        """A completion as it stands between two steps."""
        request = c.request
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=c.params.to_dict(),
            seed=c.seed,
            output_token_ids=c.seq.output_token_ids.tolist(),
            logprobs=None if c.logprobs is None else [logprob_entries(e) for e in c.logprobs],
            cumulative_logprob=c.cumulative_logprob,
            prompt_logprobs=_all_entries(request.prompt_logprobs),
            detokenizer=None if c.detokenizer is None else c.detokenizer.state_dict(),
            consumed=c.consumed,
            reported=c.reported,
            metrics=replace(request.metrics),
            hit_tokens=c.seq.hit_tokens,
            num_preemptions=c.seq.num_preemptions,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that msgpack and JSON can carry."""
        return msgspec.to_builtins(self, enc_hook=plain)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestState:
        """Raises msgspec.ValidationError naming the field that is missing or of another type."""
        return msgspec.convert(values, cls)

    def check(self, vocab_size: int) -> None:
        """Raises ValueError, naming the request and what is wrong, unless every id and count can be
        used as it is: what another process or a file says is not believed."""
        name, tokens = f"request {self.request_id!r}", len(self.output_token_ids)
        if not self.prompt_token_ids:
            raise ValueError(f"{name}: its prompt is empty")
        for kind, ids in (("prompt", self.prompt_token_ids), ("output", self.output_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                raise ValueError(
                    f"{name}: {kind} token id {bad} is outside the vocabulary [0, {vocab_size})"
                )
        limits = {
            "seed": (self.seed, 2**64 - 1),
            "consumed": (self.consumed, tokens),
            "reported": (self.reported, tokens),
            "hit_tokens": (self.hit_tokens, len(self.prompt_token_ids) + tokens),
            "num_preemptions": (self.num_preemptions, 2**31 - 1),
            "logprobs": (len(self.logprobs or ()), tokens),
            "prompt_logprobs": (len(self.prompt_logprobs or ()), len(self.prompt_token_ids)),
        }
        for field, (value, most) in limits.items():
            if not 0 <= value <= most:
                raise ValueError(f"{name}: {field} must lie in [0, {most}], got {value}")
        try:
            SamplingParams.from_dict(self.params)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None

    def load_into(self, c: Completion, tokenizer: Tokenizer | None) -> None:
        """Goes on where `of` was taken; the sequence of `c` has its tokens already."""
        if self.detokenizer is not None and tokenizer is not None:
            c.detokenizer = IncrementalDetokenizer.from_state_dict(tokenizer, self.detokenizer)
        if self.logprobs is not None:
            c.logprobs = [_logprobs(e) for e in self.logprobs]
        c.cumulative_logprob = self.cumulative_logprob
        c.consumed, c.reported = self.consumed, self.reported
        if self.prompt_logprobs is not None:
            c.request.prompt_logprobs = [e and _logprobs(e) for e in self.prompt_logprobs]
        if self.metrics is not None:
            c.request.metrics = replace(self.metrics)
        c.seq.hit_tokens, c.seq.num_preemptions = self.hit_tokens, self.num_preemptions


def logprob_entries(entry: LogprobDict) -> LogprobEntries:
    return [LogprobEntry(token, x.logprob, x.rank, x.decoded_token) for token, x in entry.items()]


def _all_entries(entries: list[LogprobDict | None] | None) -> list[LogprobEntries | None] | None:
    return None if entries is None else [e and logprob_entries(e) for e in entries]


def _logprobs(entries: LogprobEntries) -> LogprobDict:
    return {e.token: Logprob(e.logprob, e.rank, e.text) for e in entries}


def plain(value: Any) -> Any:
    """NumPy's scalars as Python's, for msgspec."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a request's state cannot hold a {type(value).__name__}")
