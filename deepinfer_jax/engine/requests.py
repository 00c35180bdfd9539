"""What the engine keeps per request: parameters, the sequences that serve it, text and
log-probabilities so far."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from deepinfer_jax.outputs import (
    CompletionOutput,
    Logprob,
    LogprobDict,
    RequestMetrics,
    RequestOutput,
)
from deepinfer_jax.runner.decode_state import ResultRows
from deepinfer_jax.sampling_params import MAX_INT32, RequestOutputKind, SamplingParams
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.text.detokenizer import IncrementalDetokenizer, token_text
from deepinfer_jax.text.tokenizer import Tokenizer


@dataclass
class Completion:
    """One sequence of a request and what has been made of its tokens. Tokens themselves stay in
    `seq`."""

    request: Request
    seq: Sequence
    rank: int  # index into the engine's local ranks
    index: int
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[LogprobDict] | None
    seed: int
    consumed: int = 0  # output tokens already given to the detokenizer
    reported: int = 0  # output tokens already part of a DELTA output
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def needs_every_step(self) -> bool:
        """True if each new token must be looked at when it arrives, not only at the end."""
        streams = self.params.output_kind is not RequestOutputKind.FINAL_ONLY
        stops = self.detokenizer is not None and bool(self.params.stop)
        return streams or stops or self.logprobs is not None

    def add_logprobs(self, rows: ResultRows, row: int, tokenizer: Tokenizer | None) -> None:
        """Appends one sampled token's entry of `logprobs`."""
        assert self.logprobs is not None and self.params.logprobs is not None
        token = int(rows.tokens[row])
        entry = logprob_entry(rows, row, token, self.params.logprobs, tokenizer)
        self.cumulative_logprob += entry[token].logprob
        self.logprobs.append(entry)

    def consume(self) -> bool:
        """Detokenises what is new; returns True if a stop string ended the text."""
        tokens = self.seq.output_token_ids
        new = tokens[self.consumed :]
        self.consumed = len(tokens)
        if self.detokenizer is None or not len(new):
            return False
        ends = self.seq.finish_reason == "stop" and self.seq.num_output_tokens == len(tokens)
        self.detokenizer.push(new, last_is_stop_token=ends)
        return self.detokenizer.stop_reason is not None

    def end(self) -> None:
        """Ends it as its sequence has ended ("abort" if it has not); once."""
        if self.finished:
            return
        self.finish_reason = self.seq.finish_reason or "abort"
        self.stop_reason = self.seq.stop_reason
        if self.detokenizer is not None:
            self.detokenizer.finish()

    def fail(self, reason: str) -> None:
        """Ends it with "error", whatever it ended with before. Its text so far is given up: making
        it may be what has failed."""
        self.finish_reason, self.stop_reason = "error", reason
        self.detokenizer, self.logprobs = None, None

    def output(self, delta: bool) -> CompletionOutput:
        """A snapshot; with delta, only what no earlier delta output held."""
        tokens = self.seq.output_token_ids
        text, first = "", 0
        if self.detokenizer is not None:
            text = self.detokenizer.take_text() if delta else self.detokenizer.text
        if delta:
            first, self.reported = self.reported, len(tokens)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tokens[first:].tolist(),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass
class Request:
    """A user's request: n completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.time()))
    prompt_logprobs: list[LogprobDict | None] | None = None

    @property
    def streams(self) -> bool:
        """Whether every step owes the caller an output."""
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        return all(c.finished for c in self.completions)

    def output(self) -> RequestOutput:
        kind = self.params.output_kind
        m = self.metrics
        m.num_prompt_tokens = len(self.prompt_token_ids)
        m.num_generation_tokens = sum(c.seq.num_output_tokens for c in self.completions)
        m.num_preemptions = sum(c.seq.num_preemptions for c in self.completions)
        m.num_cached_tokens = max(c.seq.hit_tokens for c in self.completions)
        if self.finished and m.finished_time is None:
            m.finished_time = time.time()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[c.output(kind is RequestOutputKind.DELTA) for c in self.completions],
            finished=self.finished,
            metrics=m,
            num_cached_tokens=m.num_cached_tokens,
        )

    def add_prompt_logprobs(
        self,
        rows: ResultRows,
        first_row: int,
        first_position: int,
        count: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Entries for prompt positions first_position.. from consecutive result rows."""
        assert self.params.prompt_logprobs is not None
        assert self.prompt_logprobs is not None
        known = (
            len(self.prompt_logprobs) - first_position
        )  # positions a preempted prompt's first life has answered already
        for row in range(first_row + max(known, 0), first_row + count):
            token = int(rows.tokens[row])
            self.prompt_logprobs.append(
                logprob_entry(rows, row, token, self.params.prompt_logprobs, tokenizer)
            )


def logprob_entry(
    rows: ResultRows, row: int, token: int, top: int, tokenizer: Tokenizer | None
) -> LogprobDict:
    """{token id: Logprob} of one position: the token itself and the `top` most likely."""
    value, rank, ids, tops = rows.logprobs(row)
    text = lambda i: None if tokenizer is None else token_text(tokenizer, i)  # noqa: E731
    entry = {
        int(i): Logprob(float(p), k, text(int(i)))
        for k, (i, p) in enumerate(zip(ids[:top], tops[:top], strict=True), 1)
    }
    entry.setdefault(token, Logprob(value, rank, text(token)))
    return entry


def split_seed(seed: int) -> np.ndarray:
    """A 64-bit seed as u32 [2], high word first."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def fill_sampling_row(
    c: Completion,
    view: dict[str, np.ndarray],
    row: int,
    eos_ids: Seq[int],
    force_top_k: int = 0,
) -> None:
    """Writes one completion's sampling parameters into row `row` of the admit fields (see
    `decode_state.admit_layout`). force_top_k: the most tokens it may draw from, 0: as it says."""
    p = c.params
    for name in (
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        view[name][row] = getattr(p, name)
    if force_top_k:
        view["top_k"][row] = min(p.top_k, force_top_k) if p.top_k > 0 else force_top_k
    view["temperature"][row] = 0.0 if p.greedy else p.temperature
    view["seed"][row] = split_seed(c.seed)
    view["prompt_len"][row] = c.seq.prompt_len
    least = c.seq.prompt_len + p.min_tokens if p.min_tokens else 0
    view["min_len"][row] = min(least, MAX_INT32)
    banned = dict.fromkeys((*eos_ids, *(p.stop_token_ids or ()))) if p.min_tokens else ()
    view["eos_ids"][row] = -1
    view["eos_ids"][row, : len(banned)] = list(banned)
    bias = p.logit_bias or {}
    view["bias_ids"][row] = -1
    view["bias_ids"][row, : len(bias)] = list(bias)
    view["bias_vals"][row, : len(bias)] = list(bias.values())
    view["num_logprobs"][row] = -1 if p.logprobs is None else p.logprobs
