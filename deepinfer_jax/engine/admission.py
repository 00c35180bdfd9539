"""From what a user hands in to sequences a scheduler can hold. Everything a user can get wrong is
refused here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.outputs import RequestMetrics
from deepinfer_jax.runner.decode_state import MAX_BIAS, MAX_EOS_IDS
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from deepinfer_jax.engine.llm_engine import LLMEngine

PromptInput = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""

_serial = itertools.count()


def tokenize_prompt(
    engine: LLMEngine, request_id: str, prompt: PromptInput
) -> tuple[str | None, list[int]]:
    """(text or None, token ids) of a prompt; ValueError for anything that cannot be prefilled."""
    if isinstance(prompt, Mapping):
        if (prompt.get("prompt") is None) == (prompt.get("prompt_token_ids") is None):
            raise ValueError(
                f"request {request_id!r}: give either 'prompt' or 'prompt_token_ids', got keys"
                f" {sorted(prompt)}"
            )
        text = prompt.get("prompt")
        prompt = text if text is not None else prompt["prompt_token_ids"]
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise ValueError(
                f"request {request_id!r}: the model folder has no tokenizer.json; give"
                " prompt_token_ids instead of text"
            )
        text, ids = prompt, engine.tokenizer.encode(prompt)
    else:
        text, ids = None, _as_ids(request_id, prompt)
    if not ids:
        raise ValueError(f"request {request_id!r}: the prompt is empty")
    vocab = engine.model_config.vocab_size
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab:
        bad = next(i for i, t in enumerate(ids) if not 0 <= t < vocab)
        raise ValueError(
            f"request {request_id!r}: token id {ids[bad]} at position {bad} is outside the"
            f" vocabulary [0, {vocab})"
        )
    return text, ids


def _as_ids(request_id: str, ids: Any) -> list[int]:
    array = np.asarray(ids)
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"request {request_id!r}: prompt_token_ids must be a flat list of integers, got"
            f" {array.dtype} of shape {array.shape}"
        )
    return array.tolist()


def check_request(engine: LLMEngine, request_id: str, params: SamplingParams) -> None:
    """Refuses what this engine cannot serve: duplicate ids, parameters past the engine's limits."""
    if not isinstance(request_id, str):
        raise ValueError(f"request_id must be a string, got {request_id!r}")
    if engine.is_active(request_id):
        raise ValueError(f"request {request_id!r}: a request with this id is already running")
    args, vocab = engine.args, engine.model_config.vocab_size
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > args.max_logprobs:
            raise ValueError(
                f"request {request_id!r}: {name}={value} exceeds the engine's"
                f" max_logprobs={args.max_logprobs}"
            )
    bias = params.logit_bias or {}
    if len(bias) > MAX_BIAS:
        raise ValueError(
            f"request {request_id!r}: logit_bias has {len(bias)} entries, the limit is {MAX_BIAS}"
        )
    for kind, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids or ())):
        for token in ids:
            if not 0 <= token < vocab:
                raise ValueError(
                    f"request {request_id!r}: {kind} token id {token} is outside the vocabulary [0,"
                    f" {vocab})"
                )
    stops = len({*engine.eos_token_ids, *(params.stop_token_ids or ())})
    if params.min_tokens and stops > MAX_EOS_IDS:
        raise ValueError(
            f"request {request_id!r}: min_tokens with {stops} EOS and stop ids; the limit is"
            f" {MAX_EOS_IDS}"
        )
    if params.has_penalties and not args.enable_penalties:
        raise ValueError(
            f"request {request_id!r}: penalties are switched off in this engine"
            " (enable_penalties=False)"
        )
    if params.stop and engine.tokenizer is None:
        raise ValueError(
            f"request {request_id!r}: stop strings need a tokenizer; the model folder has none"
        )


def build_request(
    engine: LLMEngine,
    request_id: str,
    prompt: PromptInput,
    params: SamplingParams,
    arrival_time: float | None,
) -> Request:
    """A Request with its n sequences, spread over the local ranks by load; nothing is
    queued yet."""
    text, ids = tokenize_prompt(engine, request_id, prompt)
    request = Request(
        request_id,
        text,
        ids,
        params,
        metrics=RequestMetrics(time.time() if arrival_time is None else arrival_time),
    )
    if params.prompt_logprobs is not None:
        request.prompt_logprobs = [None]  # nothing precedes the first token
    tokens = np.asarray(ids, np.int32)
    rank = engine.least_loaded_rank()
    base_seed = engine.draw_seed() if params.seed is None else params.seed
    for index in range(params.n):
        child = params if params.n == 1 else params.child(index)
        seq = new_sequence(engine, request, child, tokens)
        request.completions.append(
            Completion(
                request=request,
                seq=seq,
                rank=rank if index == 0 else engine.least_loaded_rank(),
                index=index,
                params=child,
                detokenizer=new_detokenizer(engine, ids, child),
                logprobs=None if child.logprobs is None else [],
                seed=(base_seed + index) % 2**64,
            )
        )
    return request


def new_sequence(
    engine: LLMEngine, request: Request, params: SamplingParams, tokens: np.ndarray
) -> Sequence:
    """The scheduler's view of one completion. Its id is never used twice, so late results cannot
    find a newer namesake."""
    limit = engine.config.max_model_len  # what lies beyond it cannot matter
    max_tokens = limit if params.max_tokens is None else min(params.max_tokens, limit)
    return Sequence(
        f"{request.request_id}#{next(_serial)}",
        tokens,
        max_tokens=max_tokens,
        eos_token_ids=engine.eos_token_ids,
        stop_token_ids=params.stop_token_ids or (),
        min_tokens=min(params.min_tokens, max_tokens),
        ignore_eos=params.ignore_eos,
        priority=params.priority,
        user_id=params.user_id,
        cache_salt=_cache_salt(engine, params),
        skip_prefix_cache=params.prompt_logprobs is not None,
    )


def _cache_salt(engine: LLMEngine, params: SamplingParams) -> str:
    """What keeps prefixes apart: the caller's salt, and the user where the KV store is
    not shared."""
    own = engine.args.kv_store_namespace == "user"
    return f"{params.user_id}\0{params.cache_salt}" if own else params.cache_salt


def new_detokenizer(
    engine: LLMEngine, ids: list[int], params: SamplingParams
) -> IncrementalDetokenizer | None:
    if engine.tokenizer is None or not params.detokenize:
        return None
    return IncrementalDetokenizer.for_request(engine.tokenizer, ids, params)
