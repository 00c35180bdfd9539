"""From what a user hands in to sequences a scheduler can hold. Everything a user can get wrong is
refused here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.outputs import RequestMetrics
from deepinfer_jax.runner.decode_state import MAX_BIAS, MAX_EOS_IDS
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.text.detokenizer import IncrementalDetokenizer
from deepinfer_jax.text.tokenizer import Tokenizer

PromptInput = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""

_serial = itertools.count()


@dataclass(frozen=True)
class RequestLimits:
    """What an engine allows a request. salt_by_user: computed prefixes are shared only between
    requests of one user."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    enable_penalties: bool
    salt_by_user: bool = False
    max_completions: int = 1024

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int) -> RequestLimits:
        return cls(
            vocab_size,
            config.max_model_len,
            config.args.max_logprobs,
            config.args.enable_penalties,
            config.args.kv_store_namespace == "user",
            config.args.max_completions,
        )


class Admission:
    """Checks, tokenises and builds requests, for one engine or for a deployment of several.

    choose_rank: the local rank for the next sequence. Nothing here holds a request.
    """

    def __init__(
        self,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        eos_token_ids: Seq[int],
        seeds: SeedSource,
        choose_rank: Callable[[], int] = lambda: 0,
    ) -> None:
        self.limits, self.tokenizer = limits, tokenizer
        self.eos_token_ids, self.seeds = tuple(eos_token_ids), seeds
        self._choose_rank = choose_rank

    # ---- checks ----------------------------------------------------------------------------------

    def tokenize(self, request_id: str, prompt: PromptInput) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt; ValueError for anything that cannot be
        prefilled."""
        prompt = _unwrap(request_id, prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"request {request_id!r}: the model folder has no tokenizer.json; give"
                    " prompt_token_ids instead of text"
                )
            text, ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, ids = None, _as_ids(request_id, prompt)
        if not ids:
            raise ValueError(f"request {request_id!r}: the prompt is empty")
        self._check_vocabulary(request_id, ids)
        return text, ids

    def _check_vocabulary(self, request_id: str, ids: list[int]) -> None:
        vocab = self.limits.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(i for i, t in enumerate(ids) if not 0 <= t < vocab)
            raise ValueError(
                f"request {request_id!r}: token id {ids[bad]} at position {bad} is outside the"
                f" vocabulary [0, {vocab})"
            )

    def check(self, request_id: str, params: SamplingParams, active: Container[str]) -> None:
        """Refuses what cannot be served: ids in `active`, parameters past the limits."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        if request_id in active:
            raise ValueError(f"request {request_id!r}: a request with this id is already running")
        if params.n > self.limits.max_completions:
            raise ValueError(
                f"request {request_id!r}: n={params.n} exceeds the engine's"
                f" max_completions={self.limits.max_completions}"
            )
        self._check_logprobs(request_id, params)
        self._check_tokens(request_id, params)
        if params.has_penalties and not self.limits.enable_penalties:
            raise ValueError(
                f"request {request_id!r}: penalties are switched off in this engine"
                " (enable_penalties=False)"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"request {request_id!r}: stop strings need a tokenizer; the model folder has none"
            )

    def _check_logprobs(self, request_id: str, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.limits.max_logprobs:
                raise ValueError(
                    f"request {request_id!r}: {name}={value} exceeds the engine's"
                    f" max_logprobs={self.limits.max_logprobs}"
                )

    def _check_tokens(self, request_id: str, params: SamplingParams) -> None:
        vocab, bias = self.limits.vocab_size, params.logit_bias or {}
        if len(bias) > MAX_BIAS:
            raise ValueError(
                f"request {request_id!r}: logit_bias has {len(bias)} entries, the limit is"
                f" {MAX_BIAS}"
            )
        for kind, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids or ())):
            for token in ids:
                if not 0 <= token < vocab:
                    raise ValueError(
                        f"request {request_id!r}: {kind} token id {token} is outside the"
                        f" vocabulary [0, {vocab})"
                    )
        stops = len({*self.eos_token_ids, *(params.stop_token_ids or ())})
        if params.min_tokens and stops > MAX_EOS_IDS:
            raise ValueError(
                f"request {request_id!r}: min_tokens with {stops} EOS and stop ids; the limit is"
                f" {MAX_EOS_IDS}"
            )

    # ---- building --------------------------------------------------------------------------------

    def build(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        arrival_time: float | None,
    ) -> Request:
        """A Request with its n sequences, spread over the local ranks by load; nothing is queued
        yet."""
        text, ids = self.tokenize(request_id, prompt)
        metrics = RequestMetrics(time.time() if arrival_time is None else arrival_time)
        request = Request(request_id, text, ids, params, metrics=metrics)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # nothing precedes the first token
        base_seed = self.seeds.draw() if params.seed is None else params.seed
        rank = self._choose_rank()
        for index in range(params.n):
            child = params if params.n == 1 else params.child(index)
            rank = self._choose_rank() if index else rank
            seed = (base_seed + index) % 2**64
            request.completions.append(self.new_completion(request, child, seed, rank, index))
        return request

    def new_completion(
        self, request: Request, params: SamplingParams, seed: int, rank: int = 0, index: int = 0
    ) -> Completion:
        """A completion without outputs. It is not yet one of the request's."""
        tokens = np.asarray(request.prompt_token_ids, np.int32)
        return Completion(
            request=request,
            seq=self.new_sequence(request.request_id, params, tokens),
            rank=rank,
            index=index,
            params=params,
            detokenizer=self.new_detokenizer(request.prompt_token_ids, params),
            logprobs=None if params.logprobs is None else [],
            seed=seed,
        )

    def new_sequence(self, request_id: str, params: SamplingParams, tokens: np.ndarray) -> Sequence:
        """The scheduler's view of one completion; tokens i32 [prompt]. Its id is never used twice,
        so late results cannot find a newer namesake."""
        limit = self.limits.max_model_len  # what lies beyond it cannot matter
        max_tokens = limit if params.max_tokens is None else min(params.max_tokens, limit)
        return Sequence(
            f"{request_id}#{next(_serial)}",
            tokens,
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids,
            stop_token_ids=params.stop_token_ids or (),
            min_tokens=min(params.min_tokens, max_tokens),
            ignore_eos=params.ignore_eos,
            priority=params.priority,
            user_id=params.user_id,
            cache_salt=self._cache_salt(params),
            skip_prefix_cache=params.prompt_logprobs is not None,
        )

    def _cache_salt(self, params: SamplingParams) -> str:
        """What keeps prefixes apart: the caller's salt, and the user where prefixes are not
        shared."""
        salt = params.cache_salt
        return f"{params.user_id}\0{salt}" if self.limits.salt_by_user else salt

    def new_detokenizer(
        self, ids: list[int], params: SamplingParams
    ) -> IncrementalDetokenizer | None:
        """None where there is no tokenizer or no text is wanted."""
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer.for_request(self.tokenizer, ids, params)


def _unwrap(request_id: str, prompt: PromptInput) -> str | Seq[int]:
    """Text or token ids. ValueError for a mapping that has both or neither."""
    if not isinstance(prompt, Mapping):
        return prompt
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None) == (ids is None):
        raise ValueError(
            f"request {request_id!r}: give either 'prompt' or 'prompt_token_ids', got keys"
            f" {sorted(prompt)}"
        )
    return ids if text is None else text


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
