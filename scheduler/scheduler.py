"""The scheduler of one DP rank: queues, limits and life cycle of every sequence.

Selection lives in prefill.py and decode.py, commits in commit.py, hand-over and forks in entry.py;
this file owns the state they share. A group of ranks takes its steps together: see group.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from deepinfer_jax.scheduler import decode, entry, prefill
from deepinfer_jax.scheduler.block_manager import BlockManager
from deepinfer_jax.scheduler.commit import process_outputs
from deepinfer_jax.scheduler.config import PREFILL_CACHE_WATERMARK, SchedulerConfig
from deepinfer_jax.scheduler.integrity import check_integrity
from deepinfer_jax.scheduler.outputs import Processed, SchedulerOutputs, StepType
from deepinfer_jax.scheduler.policies import WaitingOrder
from deepinfer_jax.scheduler.prefix import PrefixCache
from deepinfer_jax.scheduler.sequence import FINISH_REASONS, Sequence, SequenceStatus
from deepinfer_jax.scheduler.slots import SlotTable
from deepinfer_jax.scheduler.state_manager import StateManager


class Scheduler(entry.EntryMixin):
    """Scheduler of one rank. clock: seconds, monotonic; only the waiting-time policy reads it."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.policy = config.policy
        self.clock = clock
        self.blocks = BlockManager(config.num_blocks)
        self.states = StateManager(config.num_state_slots)
        self.slots = SlotTable(config.max_num_seqs, config.max_pages, config.block_size)
        self.prefix = PrefixCache(self.blocks, config.block_size, config.enable_prefix_caching)
        self.order = WaitingOrder(config)
        self.waiting: deque[Sequence] = deque()
        self.prompted: deque[Sequence] = deque()
        self.steps_in_flight = 0
        self._seqs: dict[str | int, Sequence] = {}
        self._reserved: dict[str | int, Sequence] = {}
        self._detached: dict[str | int, Sequence] = {}
        self.ended: list[Sequence] = []  # finished, to be collected by the next schedule()
        self._num_ended_waiting = 0  # finished ones still standing in `waiting`
        self._unpin_after_step: list[np.ndarray] = []
        self._new_clone_states: list[tuple[int, int]] = []
        self._group = None

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
        return self._seqs.values()

    def get(self, request_id: str | int) -> Sequence | None:
        return self._seqs.get(request_id)

    def has_unfinished(self) -> bool:
        """Another step is needed: work is queued or running, or ended sequences were not collected
        yet."""
        return bool(self.waiting or self.prompted or self.slots.num_active or self.ended)

    def check_integrity(self) -> None:
        """Raises AssertionError with the state in its message if anything leaked or disagrees.
        Callable any time."""
        check_integrity(self)

    # ---- life cycle

    def add_request(self, seq: Sequence, enqueue: bool = True) -> None:
        """Takes a request in. enqueue False only registers it (a hand-over reserves and queues it
        later).

        Raises ValueError naming the request: duplicate id, no prefill in this role, an image larger
        than a step, checkpoints without chunking.
        """
        if enqueue and not self.policy.does_prefill:
            raise ValueError(
                f"request {seq.request_id!r}: a {self.config.role.name} engine takes requests by"
                " reserve() + enqueue_prompted()"
            )
        self.register(seq)
        seq._enqueue_time = self.clock()
        if enqueue:
            self.waiting.append(seq)
            self.order.arrived(seq)

    def register(self, seq: Sequence) -> None:
        if seq.request_id in self._seqs:
            raise ValueError(
                f"request {seq.request_id!r}: this id is already in use"
                f" ({self._seqs[seq.request_id].status.name})"
            )
        if seq.status is not SequenceStatus.WAITING or seq.num_blocks:
            raise ValueError(
                f"request {seq.request_id!r}: cannot add a sequence in status {seq.status.name}"
                f" with {seq.num_blocks} blocks"
            )
        if self.policy.does_prefill:
            self._check_chunking(seq)
        if self.policy.reserves_output_storage:
            seq._reserve_storage(
                min(
                    seq.prompt_len + seq.max_tokens,
                    max(seq.prompt_len, self.config.max_model_len) + 1,
                )
            )
        self._seqs[seq.request_id] = seq

    def _check_chunking(self, seq: Sequence) -> None:
        if seq.chunk_checkpoints and not self.config.chunked_prefill:
            raise ValueError(
                f"request {seq.request_id!r}: chunk_checkpoints {seq.chunk_checkpoints} need"
                " chunked_prefill"
            )
        for span in seq.image_spans:
            if span.end - span.start > self.config.prefill_budget:
                raise ValueError(
                    f"request {seq.request_id!r}: image [{span.start}, {span.end}) has"
                    f" {span.end - span.start} tokens, more than a step holds"
                    f" ({self.config.prefill_budget})"
                )

    def abort(self, request_id: str | int) -> bool:
        """Ends a request wherever it stands; False if it is unknown or has ended already. What it
        holds is released by the usual path: free_seq for queued and running ones,
        cancel_reservation / release_detached for handed-over ones."""
        seq = self._seqs.get(request_id)
        return seq is not None and self.finish(seq, SequenceStatus.FINISHED_ABORTED)

    def finish(
        self,
        seq: Sequence,
        status: SequenceStatus,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bool:
        """Ends a sequence (stop string found, abort, failure); False if it had ended. finish_reason
        None: the status' own."""
        if not status.is_finished:
            raise ValueError(f"request {seq.request_id!r}: {status.name} is not a finished status")
        if seq.is_finished:
            return False
        if self._seqs.get(seq.request_id) is not seq:
            raise ValueError(f"request {seq.request_id!r}: not in this scheduler")
        if seq.status is SequenceStatus.RUNNING:
            self.slots.deactivate(seq.slot)
            self.ended.append(seq)
        elif seq.status is SequenceStatus.PROMPTED:
            self.prompted.remove(seq)
            self.ended.append(seq)
        elif seq.status is SequenceStatus.WAITING:
            self._num_ended_waiting += seq in self.waiting
        self.set_finished(seq, status, finish_reason, stop_reason)
        return True

    def set_finished(
        self,
        seq: Sequence,
        status: SequenceStatus,
        reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        seq.status, seq.finish_reason, seq.stop_reason = (
            status,
            reason or FINISH_REASONS[status],
            stop_reason,
        )
        self.order.ended(seq)

    def free_seq(self, seq: Sequence) -> bool:
        """Releases everything a finished sequence holds; its slot and id may be used again. False
        if that was done before.

        Raises ValueError for a sequence that has not finished or whose blocks a hand-over still
        owns.
        """
        if self._seqs.get(seq.request_id) is not seq:
            return False
        if not seq.is_finished:
            raise ValueError(
                f"request {seq.request_id!r}: cannot free a sequence in status {seq.status.name}"
            )
        if seq.request_id in self._reserved or seq.request_id in self._detached:
            raise ValueError(
                f"request {seq.request_id!r}: a hand-over owns its blocks: cancel_reservation() or"
                " release_detached() it"
            )
        if seq in self.ended:
            self.ended.remove(seq)
        elif self._num_ended_waiting and seq in self.waiting:
            self.waiting.remove(seq)
            self._num_ended_waiting -= 1
        self.release(seq)
        return True

    def release(self, seq: Sequence) -> None:
        """Gives back blocks, state row, slot and id."""
        self.release_memory(seq)
        if seq.slot >= 0:
            self.slots.unbind(seq, keep_blocks=False)
        del self._seqs[seq.request_id]

    def release_memory(self, seq: Sequence) -> None:
        """Gives back blocks (what is computed stays findable in the prefix cache) and the state
        row."""
        self.prefix.register(seq)
        self.blocks.unpin(seq.block_ids)
        if seq.slot >= 0:
            self.slots.drop_blocks(seq.slot)
        seq._blocks = np.empty(0, np.int32)
        if seq.state_id >= 0:
            self._new_clone_states = [
                pair for pair in self._new_clone_states if pair[1] != seq.state_id
            ]
            self.states.unpin(seq.state_id)
            seq.state_id = -1

    def reset_for_recompute(self, seq: Sequence) -> None:
        """Back to nothing computed, all known tokens kept: they are prefilled again as if they were
        the prompt."""
        self.release_memory(seq)
        if seq.slot >= 0:
            self.slots.unbind(seq, keep_blocks=False)
        seq._num_cached = seq._num_scheduled = seq._chunks_in_flight = 0
        seq._decoding = seq._shares_last_block = False
        seq._epoch += 1
        self.prefix.forget(seq)
        seq.status = SequenceStatus.WAITING

    def push_front(self, seq: Sequence) -> None:
        """Front of `waiting`, yet behind those that already hold blocks: ahead of them it could
        wait for their blocks for ever."""
        position = 0
        for other in self.waiting:
            if not other.num_blocks:
                break
            position += 1
        self.waiting.insert(position, seq)

    def preempt(self, seq: Sequence, out: SchedulerOutputs) -> None:
        """Takes the blocks of a running or prompted sequence away: stopped, or recomputed later."""
        seq.num_preemptions += 1
        out.preempted.append(seq)
        if seq.status is SequenceStatus.PROMPTED:
            self.prompted.remove(seq)
        if self.config.stop_preempted_request or seq.grammar_active:
            if seq.slot >= 0:
                self.slots.deactivate(seq.slot)
            self.release_memory(seq)
            self.set_finished(seq, SequenceStatus.FINISHED_PREEMPTED)
            self.ended.append(seq)
        else:
            self.reset_for_recompute(seq)
            self.push_front(seq)

    def max_len_of(self, seq: Sequence) -> int:
        """The number of tokens at which a sequence ends by length; a prompt that fills
        max_model_len still gets one token."""
        return max(
            seq.prompt_len + 1, min(seq.prompt_len + seq.max_tokens, self.config.max_model_len)
        )

    def bind(self, seq: Sequence) -> None:
        self.slots.bind(
            seq,
            self.max_len_of(seq),
            self.config.num_speculative_tokens if self.policy.has_draft_pool else 0,
        )

    def admit(self, seq: Sequence, out: SchedulerOutputs) -> None:
        """Makes a sequence RUNNING: slot (which is also its draft slot) and the whole block table
        for the device."""
        if seq.slot < 0:
            self.bind(seq)
        seq.status = SequenceStatus.RUNNING
        self.slots.activate(seq.slot)
        out.admitted.append(seq)

    def set_num_drafts(self, slots: np.ndarray, num_drafts: np.ndarray) -> None:
        """How many drafts of each slot to verify from the next schedule() on (0 ..
        num_speculative_tokens). Default: num_speculative_tokens."""
        most = self.config.num_speculative_tokens
        if len(slots) and not 0 <= np.min(num_drafts) <= np.max(num_drafts) <= most:
            raise ValueError(
                f"num_drafts must lie in [0, num_speculative_tokens={most}], got {num_drafts}"
            )
        self.slots.num_drafts[slots] = num_drafts

    # ---- steps

    def schedule(self) -> SchedulerOutputs:
        """One step of a rank on its own (a group of ranks is scheduled by SchedulerGroup)."""
        from deepinfer_jax.scheduler.group import (  # group.py builds on this module
            LocalDPGroup,
            SchedulerGroup,
        )

        if self._group is None:
            self._group = SchedulerGroup([self], LocalDPGroup(1))
        return self._group.schedule()[0]

    def wants_prefill(self) -> bool:
        """This rank's vote: the head of `waiting` could start and the pool is not nearly full.

        A rank where nothing is running ignores the watermark: an unfinished prompt that fills the
        pool could never go on.
        """
        head = next((seq for seq in self.waiting if not seq.is_finished), None)
        if head is None or not head.schedulable:
            return False
        return self.cache_usage <= PREFILL_CACHE_WATERMARK or not self.slots.num_active

    @property
    def has_nothing_to_decode(self) -> bool:
        return not self.slots.num_active and not self.prompted

    def must_clone(self, seq: Sequence) -> bool:
        """A fork's half-written last block is copied, unless nobody else holds it any more."""
        return seq._shares_last_block and bool(self.blocks.ref_counts[seq.block_ids[-1]] > 1)

    def can_admit_prompted(self) -> bool:
        """The next decode step moves the head of `prompted` to running."""
        if not self.prompted:
            return False
        seq = self.prompted[0]
        return (seq.slot >= 0 or self.slots.num_free > 0) and (
            not self.must_clone(seq) or self.blocks.num_free > 0
        )

    def schedule_prefill(self) -> SchedulerOutputs | None:
        """A prefill step; None when nothing could be scheduled and the role can decode instead."""
        return prefill.select_prefill(self)

    def schedule_decode(self) -> SchedulerOutputs:
        return decode.select_decode(self)

    def empty_prefill(self) -> SchedulerOutputs:
        """Keeps a prefilling group company."""
        return self.emit(SchedulerOutputs(StepType.PREFILL))

    def collect_finished(self) -> list[Sequence]:
        """Ended sequences nobody has been told about; schedule() does this too
        (`outputs.finished`)."""
        ended, self.ended = self.ended, []
        return ended

    def sweep_waiting(self) -> list[Sequence]:
        """Takes the ended ones out of `waiting`, wherever they stand."""
        if not self._num_ended_waiting:
            return []
        swept = [seq for seq in self.waiting if seq.is_finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.is_finished)
        self._num_ended_waiting = 0
        return swept

    def unpin_after_step(self, blocks: np.ndarray) -> None:
        """Sources of copies stay held until the step is built, so that no destination of this step
        can be one of them."""
        self._unpin_after_step.append(blocks)

    def emit(self, out: SchedulerOutputs, updates: list[tuple] | None = None) -> SchedulerOutputs:
        """Completes the outputs of a step."""
        out.admitted = [
            seq for seq in out.admitted if seq.status is SequenceStatus.RUNNING
        ]  # not preempted again meanwhile
        out.finished += self.collect_finished()
        out.clone_states += self._new_clone_states
        self._new_clone_states = []
        for blocks in self._unpin_after_step:
            self.blocks.unpin(blocks)
        self._unpin_after_step = []
        out.block_updates = self._block_updates(out, updates or [])
        out._seq_by_slot = self.slots.snapshot_seqs()
        if not out.is_empty:
            self.steps_in_flight += 1
        return out

    def _block_updates(
        self, out: SchedulerOutputs, updates: list
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whole tables of admitted slots, then what running ones have grown by."""
        grown = [self._drop_rows(out, update) for update in updates]
        updates = [self.slots.table_update(seq.slot) for seq in out.admitted] + [
            update for update in grown if update[0].size
        ]
        if not updates:
            return out.block_updates
        return (
            updates[0]
            if len(updates) == 1
            else tuple(np.concatenate(part) for part in zip(*updates, strict=True))
        )

    def _drop_rows(
        self, out: SchedulerOutputs, update: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> tuple:
        """Without the rows of slots admitted just now: their whole table is sent anyway."""
        if not out.admitted:
            return update
        keep = ~np.isin(update[0], [seq.slot for seq in out.admitted])
        return tuple(part[keep] for part in update)

    def process_outputs(
        self, outputs: SchedulerOutputs, token_ids: np.ndarray, num_new: np.ndarray | None = None
    ) -> Processed:
        """Commits a step's tokens. token_ids: i32 [n] or [n, 1 + num_speculative_tokens], rows in
        the order of outputs.prefill or outputs.slots (rows of unfinished chunks are ignored);
        num_new: i32 [n] valid tokens per row (None: one each).

        Raises ValueError when the shapes do not match the step or num_new is not in [1, q_len].
        """
        return process_outputs(self, outputs, token_ids, num_new)
