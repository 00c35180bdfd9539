"""The scheduler of one DP rank, composed of its parts.

state.py holds what they share; lifecycle.py, entry.py, prefill.py, decode.py and commit.py are the
functions on it. A group of ranks takes its steps together: see group.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from deepinfer_jax.scheduler import commit, decode, entry, integrity, lifecycle, prefill
from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.group import LocalDPGroup, SchedulerGroup
from deepinfer_jax.scheduler.outputs import Processed, SchedulerOutputs, StepType
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import SchedulerState


class Scheduler:
    """Queues, limits and life cycle of every sequence of one rank.

    clock: seconds, monotonic; only the waiting-time policy reads it. The managers and queues of
    its state (`blocks`, `slots`, `states`, `prefix`, `waiting`, `prompted`) may be read by anybody.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = state = SchedulerState(config, clock)
        self.config, self.policy = config, config.policy
        self.blocks, self.states, self.slots = state.blocks, state.states, state.slots
        self.prefix, self.order = state.prefix, state.order
        self.waiting, self.prompted, self.ended = state.waiting, state.prompted, state.ended
        self._alone: SchedulerGroup | None = None

    # ---- what the engine asks

    @property
    def block_tables(self) -> np.ndarray:
        """i32 [max_num_seqs, max_pages]; row `slot` holds `seq.num_blocks` entries, the rest is any
        valid block."""
        return self.slots.block_tables

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_prompted(self) -> int:
        return len(self.prompted)

    @property
    def num_running(self) -> int:
        return self.slots.num_active

    @property
    def cache_usage(self) -> float:
        """Held blocks / all blocks; cached ones that nobody holds do not count."""
        return self.blocks.usage

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Everything that holds anything here, in order of arrival."""
        return self.state.sequences

    def get(self, request_id: str | int) -> Sequence | None:
        return self.state.registered.get(request_id)

    def has_unfinished(self) -> bool:
        """Another step is needed: work is queued or running, or ended sequences were not collected
        yet."""
        return self.state.has_unfinished

    def max_len_of(self, seq: Sequence) -> int:
        """The number of tokens at which a sequence ends by length."""
        return self.state.max_len_of(seq)

    def check_integrity(self) -> None:
        """Raises AssertionError with the state in its message if anything leaked or disagrees.
        Callable any time."""
        integrity.check_integrity(self.state)

    # ---- life cycle

    def add_request(self, seq: Sequence, enqueue: bool = True) -> None:
        """Takes a request in: see lifecycle.add_request()."""
        lifecycle.add_request(self.state, seq, enqueue)

    def enqueue_waiting(self, seq: Sequence) -> None:
        """Queues a sequence that add_request(enqueue=False) has registered."""
        lifecycle.enqueue_waiting(self.state, seq)

    def abort(self, request_id: str | int) -> bool:
        """Ends a request wherever it stands; False if it is unknown or has ended already. What it
        holds is released by the usual path: free_seq for queued and running ones,
        cancel_reservation / release_detached for handed-over ones."""
        seq = self.get(request_id)
        return seq is not None and self.finish(seq, SequenceStatus.FINISHED_ABORTED)

    def finish(
        self,
        seq: Sequence,
        status: SequenceStatus,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bool:
        """Ends a sequence; False if it had ended: see lifecycle.finish()."""
        return lifecycle.finish(self.state, seq, status, finish_reason, stop_reason)

    def free_seq(self, seq: Sequence) -> bool:
        """Releases everything a finished sequence holds: see lifecycle.free_seq()."""
        return lifecycle.free_seq(self.state, seq)

    # ---- hand-overs and forks

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Holds a slot, a state row and blocks for num_tokens tokens: see entry.reserve()."""
        return entry.reserve(self.state, seq, num_tokens)

    def enqueue_prompted(
        self, seq: Sequence, output_token_ids: Iterable[int] = (), num_cached: int | None = None
    ) -> bool:
        """The KV of a reserved sequence has arrived: see entry.enqueue_prompted()."""
        return entry.enqueue_prompted(self.state, seq, output_token_ids, num_cached)

    def cancel_reservation(self, seq: Sequence) -> bool:
        """Gives a reservation back. Idempotent: False if there is none."""
        return entry.cancel_reservation(self.state, seq)

    def detach(self, seq: Sequence) -> None:
        """Hands a prefilled sequence over: see entry.detach()."""
        entry.detach(self.state, seq)

    def release_detached(self, seq: Sequence) -> bool:
        """The hand-over is over, its blocks may be reused. Idempotent: False if there is none."""
        return entry.release_detached(self.state, seq)

    def fork_seq(
        self,
        source: Sequence,
        request_id: str | int,
        *,
        blocks: Iterable[int] | None = None,
        num_tokens: int | None = None,
        replace_last_token_id: int | None = None,
        prompt_logprobs: bool = False,
        **overrides: Any,
    ) -> Sequence:
        """A new sequence on top of the computed prefix of `source`: see entry.fork_seq()."""
        return entry.fork_seq(
            self.state,
            source,
            request_id,
            blocks=blocks,
            num_tokens=num_tokens,
            replace_last_token_id=replace_last_token_id,
            prompt_logprobs=prompt_logprobs,
            **overrides,
        )

    # ---- steps

    def schedule(self) -> SchedulerOutputs:
        """One step of a rank on its own (a group of ranks is scheduled by SchedulerGroup)."""
        if self._alone is None:
            self._alone = SchedulerGroup([self], LocalDPGroup(1))
        return self._alone.schedule()[0]

    def wants_prefill(self) -> bool:
        """This rank's vote: see SchedulerState.wants_prefill."""
        return self.state.wants_prefill

    def has_nothing_to_decode(self) -> bool:
        return self.state.has_nothing_to_decode

    def schedule_prefill(self) -> SchedulerOutputs | None:
        """A prefill step; None when nothing could be scheduled and the role can decode instead."""
        return prefill.select_prefill(self.state)

    def schedule_decode(self) -> SchedulerOutputs:
        return decode.select_decode(self.state)

    def empty_prefill(self) -> SchedulerOutputs:
        """Keeps a prefilling group company."""
        return self.state.emit(SchedulerOutputs(StepType.PREFILL))

    def set_num_drafts(self, slots: np.ndarray, num_drafts: np.ndarray) -> None:
        """How many drafts of each slot to verify from the next schedule() on. slots: int [n];
        num_drafts: int [n] in 0 .. num_speculative_tokens, which is also the default."""
        most = self.config.num_speculative_tokens
        if len(slots) and not 0 <= np.min(num_drafts) <= np.max(num_drafts) <= most:
            raise ValueError(
                f"num_drafts must lie in [0, num_speculative_tokens={most}], got {num_drafts}"
            )
        self.slots.num_drafts[slots] = num_drafts

    def process_outputs(
        self, outputs: SchedulerOutputs, token_ids: np.ndarray, num_new: np.ndarray | None = None
    ) -> Processed:
        """Commits a step's tokens: see commit.process_outputs()."""
        return commit.process_outputs(self.state, outputs, token_ids, num_new)
