"""An engine's request as plain values, and back: what goes into a `RequestState` (handoff.py) and
how another engine goes on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.disagg.protocol import RequestState
from deepinfer_jax.engine.admission import new_detokenizer, new_sequence
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.outputs import Logprob, LogprobDict, RequestMetrics
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from deepinfer_jax.engine.llm_engine import LLMEngine


def request_state(c: Completion) -> RequestState:
    """A completion after its first token."""
    request = c.request
    return RequestState(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=c.params.to_dict(),
        seed=c.seed,
        output_token_ids=c.seq.output_token_ids.tolist(),
        logprobs=None if c.logprobs is None else [logprob_entries(e) for e in c.logprobs],
        cumulative_logprob=c.cumulative_logprob,
        prompt_logprobs=None
        if request.prompt_logprobs is None
        else [e and logprob_entries(e) for e in request.prompt_logprobs],
        detokenizer=None if c.detokenizer is None else c.detokenizer.state_dict(),
        consumed=c.consumed,
        reported=c.reported,
        metrics=dataclasses.asdict(request.metrics),
        hit_tokens=c.seq.hit_tokens,
        num_preemptions=c.seq.num_preemptions,
    )


def new_completion(
    engine: LLMEngine, handoff_id: str, state: RequestState, params: SamplingParams, rank: int
) -> Completion:
    """A completion without outputs, as the engine that reserves for it needs it."""
    request = Request(handoff_id, None, state.prompt_token_ids, params)
    seq = new_sequence(engine, request, params, np.asarray(state.prompt_token_ids, np.int32))
    detokenizer = new_detokenizer(engine, state.prompt_token_ids, params)
    c = Completion(
        request,
        seq,
        rank,
        0,
        params,
        detokenizer,
        None if params.logprobs is None else [],
        state.seed,
    )
    request.completions.append(c)
    return c


def load_state(engine: LLMEngine, c: Completion, state: RequestState) -> None:
    """Goes on where `request_state` was taken; the sequence has its tokens already."""
    if state.detokenizer is not None and engine.tokenizer is not None:
        c.detokenizer = IncrementalDetokenizer.from_state_dict(engine.tokenizer, state.detokenizer)
    if state.logprobs is not None:
        c.logprobs = [_logprobs(e) for e in state.logprobs]
    c.cumulative_logprob, c.consumed, c.reported = (
        state.cumulative_logprob,
        state.consumed,
        state.reported,
    )
    if state.prompt_logprobs is not None:
        c.request.prompt_logprobs = [e and _logprobs(e) for e in state.prompt_logprobs]
    c.request.metrics = RequestMetrics(**state.metrics)
    c.seq.hit_tokens, c.seq.num_preemptions = state.hit_tokens, state.num_preemptions


def logprob_entries(entry: LogprobDict) -> list[list[Any]]:
    """Plain values; JSON has no integer keys."""
    return [[token, x.logprob, x.rank, x.decoded_token] for token, x in entry.items()]


def _logprobs(entries: list[list[Any]]) -> LogprobDict:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in entries}
