"""Selection of a decode step: prompted sequences first, then everything running, preempting only
when blocks run out."""

from __future__ import annotations

import numpy as np

from deepinfer_jax.scheduler import lifecycle
from deepinfer_jax.scheduler.outputs import SchedulerOutputs, StepType
from deepinfer_jax.scheduler.prefill import clone_last_block
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import BlockUpdate, SchedulerState

_ONES = np.ones(1, np.int32)


def select_decode(s: SchedulerState) -> SchedulerOutputs:
    """One decode row (1 + drafts tokens) for every running sequence that can still
    produce a token."""
    out = SchedulerOutputs(StepType.DECODE)
    s.ended += s.sweep_waiting()
    _admit_prompted(s, out)
    t = s.slots
    slots, q_lens = _eligible(s)
    growth: BlockUpdate | None = None
    if slots.size:
        kv_lens = t.max_num_tokens[slots] + (q_lens - 1)
        short = kv_lens > t.capacity[slots]
        if short.any():
            keep, growth = _grow(s, slots, kv_lens, short, out)
            if keep is not None:
                slots, q_lens, kv_lens = slots[keep], q_lens[keep], kv_lens[keep]
        t.max_num_tokens[slots] = kv_lens + 1
        t.in_flight[slots] += 1
        out.slots, out.q_lens, out.kv_lens = slots.astype(np.int32), q_lens, kv_lens
        out.serials = t.serial[slots]
    return s.emit(out, growth)


def _eligible(s: SchedulerState) -> tuple[np.ndarray, np.ndarray]:
    """(slots, q_lens): running sequences not already certain to end by length with their tokens in
    flight."""
    t, num_speculative_tokens = s.slots, s.config.num_speculative_tokens
    slots = t.ordered(lengths_drift=num_speculative_tokens > 0)
    if not slots.size:
        return slots, _ones(0)
    if not s.steps_in_flight and not num_speculative_tokens:
        return slots, _ones(slots.size)
    room = t.max_len[slots] - t.num_tokens[slots] - t.in_flight[slots]
    if room.min() <= 0:
        slots, room = slots[room > 0], room[room > 0]
    if not num_speculative_tokens:
        return slots, _ones(slots.size)
    # A draft beyond the length limit could never be kept.
    return slots, 1 + np.minimum(t.num_drafts[slots], room - 1)


def _ones(count: int) -> np.ndarray:
    """i32 [count] ones, shared and read-only: nothing is written for the common case of one row per
    sequence."""
    global _ONES
    if _ONES.size < count:
        _ONES = np.ones(2 * count, np.int32)
        _ONES.flags.writeable = False
    return _ONES[:count]


def _admit_prompted(s: SchedulerState, out: SchedulerOutputs) -> None:
    while s.prompted:
        seq = s.prompted[0]
        if seq.slot < 0 and not s.slots.num_free:
            return
        if seq.shares_last_block:
            if not _room_for_clone(s, seq, out):
                if s.prompted and s.prompted[0] is seq:
                    return
                continue
            clone_last_block(s, seq, s.blocks.allocate(int(s.must_clone(seq))), out)
        s.prompted.popleft()
        lifecycle.admit(s, seq, out)


def _room_for_clone(s: SchedulerState, seq: Sequence, out: SchedulerOutputs) -> bool:
    """A free block for the copy of the fork's last block. If everybody who holds blocks waits for
    blocks, nobody will release one: the last of `prompted` is preempted."""
    while s.must_clone(seq) and not s.blocks.num_free:
        if any(q.num_blocks and not _waits_for_blocks(s, q) for q in s.sequences):
            return False
        last = s.prompted[-1]
        lifecycle.preempt(s, last, out)
        if last is seq:
            return False
    return True


def _waits_for_blocks(s: SchedulerState, seq: Sequence) -> bool:
    if seq.status is SequenceStatus.WAITING:
        return s.must_clone(seq) or s.config.pages(seq.num_tokens) > seq.num_blocks
    return seq.status is SequenceStatus.PROMPTED


def _grow(
    s: SchedulerState,
    slots: np.ndarray,
    kv_lens: np.ndarray,
    short: np.ndarray,
    out: SchedulerOutputs,
) -> tuple[np.ndarray | None, BlockUpdate | None]:
    """Gives every sequence the blocks this step writes to.

    slots: intp [n]; kv_lens: i32 [n] keys after the step; short: bool [n] lacks blocks for them.
    Returns a mask of the sequences that can run (None: all of them) and the new table entries.
    """
    t = s.slots
    rows = np.flatnonzero(short)
    counts = s.config.pages(kv_lens[rows]) - t.pages[slots[rows]]
    keep = None
    if counts.sum() > s.blocks.num_free:
        need = np.zeros(slots.size, np.int64)
        need[rows] = counts
        keep = _preempt_until_fits(s, slots, need, out)
        rows = np.flatnonzero(short & keep)
        counts = need[rows]
    if not rows.size:
        return keep, None
    blocks = s.blocks.allocate(int(counts.sum()))
    return keep, (*t.add_pages(slots[rows], counts, blocks), blocks)


def _preempt_until_fits(
    s: SchedulerState, slots: np.ndarray, need: np.ndarray, out: SchedulerOutputs
) -> np.ndarray:
    """LCFS: serve from the shortest output, preempt from the longest; bool mask of those that run.

    A sequence misses this step, costing nobody's work, if ended sequences are about to give back
    enough blocks; or if it would have to preempt itself while its next token is in flight: dropping
    that token, time and again, would be no progress.
    """
    keep = np.ones(slots.size, bool)
    order = _lcfs_order(s, slots)
    releasing = _blocks_about_to_be_released(s, slots)
    front, committed = 0, 0
    for back in range(order.size - 1, -1, -1):
        row = order[back]
        if back < front:
            break
        if s.blocks.num_free - committed < need[row] <= releasing:
            releasing -= int(need[row])
            keep[row] = False
            continue
        while s.blocks.num_free - committed < need[row] and front < back:
            keep[order[front]] = False
            lifecycle.preempt(s, s.slots.seq_at(int(slots[order[front]])), out)
            front += 1
        if s.blocks.num_free - committed >= need[row]:
            committed += int(need[row])
            continue
        keep[row] = False
        if not s.slots.in_flight[slots[row]]:
            lifecycle.preempt(s, s.slots.seq_at(int(slots[row])), out)
    return keep


def _lcfs_order(s: SchedulerState, slots: np.ndarray) -> np.ndarray:
    """Rows, first to be preempted first: (lower priority if that policy is on,) longer output,
    later admission."""
    t = s.slots
    keys = [-t.admission[slots], t.prompt_len[slots] - t.num_tokens[slots]]
    if s.config.priority_scheduling:
        keys.append(t.priority[slots])
    return np.lexsort(keys)


def _blocks_about_to_be_released(s: SchedulerState, slots: np.ndarray) -> int:
    """Blocks of sequences that have just ended, or are certain to end with the step in flight."""
    t = s.slots
    ending = t.active.copy()
    ending[slots] = False
    held = [seq.block_ids for seq in s.ended if seq.num_blocks] + [
        t.blocks_of(slot) for slot in np.flatnonzero(ending).tolist()
    ]
    return sum(int((s.blocks.ref_counts[blocks] == 1).sum()) for blocks in held)
