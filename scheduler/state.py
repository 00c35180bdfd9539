"""What all parts of one rank's scheduler share: the managers, the queues and who holds what.

Plain data with the questions that several parts ask. What changes a sequence's life is in
lifecycle.py; selection, commit and entry are in modules of their own; `Scheduler` composes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from deepinfer_jax.scheduler.block_manager import BlockManager
from deepinfer_jax.scheduler.config import PREFILL_CACHE_WATERMARK, SchedulerConfig
from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.policies import WaitingOrder
from deepinfer_jax.scheduler.prefix import PrefixCache
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.slots import SlotTable
from deepinfer_jax.scheduler.state_manager import StateManager

BlockUpdate = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(slots, page_index, block_id), i32 [n] each."""


class SchedulerState:
    """State of one rank. clock: seconds, monotonic; only the waiting-time policy reads it."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.policy = config.policy
        self.clock = clock
        self.blocks = BlockManager(config.num_blocks)
        self.states = StateManager(config.num_state_slots)
        self.slots = SlotTable(config.max_num_seqs, config.max_pages, config.block_size)
        self.prefix = PrefixCache(
            self.blocks,
            config.block_size,
            config.enable_prefix_caching,
            config.state_restart if config.num_state_slots else 0,
        )
        self.order = WaitingOrder(config)
        self.waiting: deque[Sequence] = deque()
        self.prompted: deque[Sequence] = deque()
        # Everything that holds anything, by request id; two of its parts again: hand-overs.
        self.registered: dict[str | int, Sequence] = {}
        self.reserved: dict[str | int, Sequence] = {}
        self.detached: dict[str | int, Sequence] = {}
        # Ended, to be collected by the next schedule().
        self.ended: list[Sequence] = []
        # Ended ones that still stand in `waiting`.
        self.num_ended_waiting = 0
        self.steps_in_flight = 0
        # Sources of copies stay held until the step is built, so that no destination of this step
        # can be one of them.
        self.held_until_emit: list[np.ndarray] = []
        self.new_clone_states: list[tuple[int, int]] = []

    # ---- questions

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Everything that holds anything here, in order of arrival."""
        return self.registered.values()

    @property
    def has_unfinished(self) -> bool:
        """Work is queued or running, or ended sequences were not collected yet."""
        return bool(self.waiting or self.prompted or self.slots.num_active or self.ended)

    @property
    def has_nothing_to_decode(self) -> bool:
        return not self.slots.num_active and not self.prompted

    @property
    def wants_prefill(self) -> bool:
        """This rank's vote: the head of `waiting` could start and the pool is not nearly full.

        A rank where nothing is running ignores the watermark: an unfinished prompt that fills the
        pool could never go on.
        """
        head = next((seq for seq in self.waiting if not seq.is_finished), None)
        if head is None or not head.schedulable:
            return False
        return self.blocks.usage <= PREFILL_CACHE_WATERMARK or not self.slots.num_active

    def max_len_of(self, seq: Sequence) -> int:
        """The number of tokens at which a sequence ends by length; a prompt that fills
        max_model_len still gets one token."""
        return max(
            seq.prompt_len + 1, min(seq.prompt_len + seq.max_tokens, self.config.max_model_len)
        )

    def must_clone(self, seq: Sequence) -> bool:
        """A fork's half-written last block is copied, unless nobody else holds it any more."""
        return seq.shares_last_block and bool(self.blocks.ref_counts[seq.block_ids[-1]] > 1)

    def can_admit_prompted(self) -> bool:
        """The next decode step moves the head of `prompted` to running."""
        if not self.prompted:
            return False
        seq = self.prompted[0]
        return (seq.slot >= 0 or self.slots.num_free > 0) and (
            not self.must_clone(seq) or self.blocks.num_free > 0
        )

    # ---- building a step

    def collect_ended(self) -> list[Sequence]:
        """Ended sequences nobody has been told about."""
        ended = self.ended.copy()
        self.ended.clear()
        return ended

    def sweep_waiting(self) -> list[Sequence]:
        """Takes the ended ones out of `waiting`, wherever they stand."""
        if not self.num_ended_waiting:
            return []
        swept = [seq for seq in self.waiting if seq.is_finished]
        kept = [seq for seq in self.waiting if not seq.is_finished]
        self.waiting.clear()
        self.waiting.extend(kept)
        self.num_ended_waiting = 0
        return swept

    def emit(self, out: SchedulerOutputs, growth: BlockUpdate | None = None) -> SchedulerOutputs:
        """Completes the outputs of a step. growth: blocks that running slots took."""
        # An admitted sequence may have been preempted again meanwhile.
        out.admitted = [seq for seq in out.admitted if seq.status is SequenceStatus.RUNNING]
        out.finished += self.collect_ended()
        out.clone_states += self.new_clone_states
        self.new_clone_states = []
        for blocks in self.held_until_emit:
            self.blocks.unpin(blocks)
        self.held_until_emit = []
        if growth is not None:
            out.block_updates = _without_admitted(out, growth)
        out.seq_by_slot = self.slots.snapshot_seqs()
        if not out.is_empty:
            self.steps_in_flight += 1
        return out


def _without_admitted(out: SchedulerOutputs, growth: BlockUpdate) -> BlockUpdate:
    if not out.admitted:
        return growth
    keep = ~np.isin(growth[0], [seq.slot for seq in out.admitted])
    slots, pages, blocks = (part[keep] for part in growth)
    return slots, pages, blocks
