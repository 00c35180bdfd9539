"""Scheduler configuration: validated once, at construction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.scheduler.roles import EngineType, RolePolicy

DEFAULT_MAX_SUM_SEQLEN_K = 2**30
PREFILL_CACHE_WATERMARK = 0.9
"""A NORMAL rank with a fuller block pool than this does not ask for a prefill step while it has
something to decode."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one rank's scheduler. Lengths and budgets are in tokens, intervals in decode steps.

    num_speculative_tokens: drafts verified per decode step at most. zos: schedule(N+1) comes before
    process_outputs(N). num_state_slots: rows of the model's StateCaches, row 0 being padding (0:
    the model has none). state_restart: a sequence whose earlier tokens are in blocks may start
    without state at multiples of this (0: nowhere).
    Optional policies, off by default: priority_scheduling     higher
    `Sequence.priority` first, and preempted last fair_users              waiting prompts are
    ordered by the tokens their `user_id` was already served max_waiting_time        seconds after
    which a waiting prompt goes before all others expected_output_fraction  a prompt is admitted
    only if this fraction of max_tokens of every running request (and its
                              own) could still be stored: 1.0 never preempts, 0.0 reserves nothing
    Raises ValueError for any impossible combination, naming the values.
    """

    role: EngineType = EngineType.NORMAL
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    chunked_prefill: bool = False
    stop_preempted_request: bool = True
    prefill_max_sum_seqlen_k: int = DEFAULT_MAX_SUM_SEQLEN_K
    num_speculative_tokens: int = 0
    zos: bool = False
    context_parallel_size: int = 1
    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    enable_prefix_caching: bool = False
    num_state_slots: int = 0
    state_restart: int = 0
    priority_scheduling: bool = False
    fair_users: bool = False
    max_waiting_time: float | None = None
    expected_output_fraction: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", EngineType(self.role))
        self._check_positive()
        self._check_role()
        self._check_prefill_limits()
        if self.enable_prefix_caching and self.num_state_slots and not self.state_restart:
            raise ValueError(
                "enable_prefix_caching needs a model whose per-sequence state can be made of its"
                f" blocks, got num_state_slots={self.num_state_slots} and state_restart=0: a reused"
                " prefix has blocks but no state"
            )
        if self.num_state_slots and self.num_state_slots < self.max_num_seqs + 1:
            raise ValueError(
                f"num_state_slots={self.num_state_slots} must be at least max_num_seqs + 1 ="
                f" {self.max_num_seqs + 1}"
            )
        if not 0.0 <= self.expected_output_fraction <= 1.0:
            raise ValueError(
                f"expected_output_fraction must lie in [0, 1], got {self.expected_output_fraction}"
            )
        if self.max_waiting_time is not None and self.max_waiting_time < 0:
            raise ValueError(f"max_waiting_time must be >= 0 seconds, got {self.max_waiting_time}")

    def _check_positive(self) -> None:
        positive = (
            "block_size",
            "num_blocks",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "context_parallel_size",
        )
        for name in (*positive, "prefill_attempt_interval", "prefill_any_attempt_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("num_speculative_tokens", "num_state_slots", "state_restart"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    def _check_role(self) -> None:
        if not self.policy.allows_context_parallel and self.context_parallel_size > 1:
            raise ValueError(
                f"a {self.role.name} engine cannot use context parallelism, got"
                f" context_parallel_size={self.context_parallel_size}"
            )
        if not self.policy.allows_recompute and not self.stop_preempted_request:
            raise ValueError(
                f"a {self.role.name} engine cannot recompute preempted requests (it never"
                " prefills): set stop_preempted_request"
            )

    def _check_prefill_limits(self) -> None:
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least"
                f" block_size={self.block_size}"
            )
        if not self.policy.does_prefill:
            return
        if self.prefill_budget < 1:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"2 * context_parallel_size = {2 * self.context_parallel_size}"
            )
        if not self.chunked_prefill and self.prefill_budget < self.max_model_len:
            raise ValueError(
                "without chunked_prefill a step must hold the longest prompt:"
                f" max_num_batched_tokens={self.max_num_batched_tokens} (usable:"
                f" {self.prefill_budget}) < max_model_len={self.max_model_len}"
            )
        if self.prefill_max_sum_seqlen_k < self.prompt_limit:
            raise ValueError(
                f"prefill_max_sum_seqlen_k={self.prefill_max_sum_seqlen_k} must be at least the"
                f" prompt limit {self.prompt_limit}"
            )

    @property
    def policy(self) -> RolePolicy:
        return self.role.policy

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that is accepted."""
        return (
            self.max_model_len
            if self.chunked_prefill
            else min(self.max_model_len, self.max_num_batched_tokens)
        )

    @property
    def prefill_budget(self) -> int:
        """Tokens one prefill step may hold: max_num_batched_tokens, down to a multiple of 2 * CP
        (each CP rank owns two chunks)."""
        return self.align_down(self.max_num_batched_tokens)

    def align_down(self, num_tokens: int) -> int:
        if self.context_parallel_size == 1:
            return num_tokens
        return num_tokens - num_tokens % (2 * self.context_parallel_size)

    @property
    def runtime_max_model_len(self) -> int:
        """Exclusive bound of every position a step may write, drafts and optimistic lengths
        included."""
        return (
            self.max_model_len
            + self.num_speculative_tokens
            + (self.num_speculative_tokens + 1 if self.zos else 0)
            + self.num_speculative_tokens
        )

    @property
    def max_pages(self) -> int:
        """Width of a block table."""
        return self.pages(self.runtime_max_model_len + 1)

    def pages[N: (int, np.ndarray)](self, num_tokens: N) -> N:
        return -(-num_tokens // self.block_size)
