"""Selection of a prefill step, from the head of `waiting`, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from deepinfer_jax.scheduler import lifecycle
from deepinfer_jax.scheduler.outputs import PrefillItem, SchedulerOutputs, StepType
from deepinfer_jax.scheduler.prefix import PrefixHit
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import SchedulerState


@dataclass(frozen=True)
class _Chunk:
    """What scheduling the head would take."""

    q_start: int
    q_len: int
    is_last: bool
    new_blocks: int
    hit: PrefixHit | None  # not None: the sequence has no blocks yet


class _Refusal(Enum):
    STOP = auto()  # not now: nothing behind it may overtake
    TOO_LONG = auto()
    POOL_TOO_SMALL = auto()


def select_prefill(s: SchedulerState) -> SchedulerOutputs | None:
    """Fills a prefill step; None if it would be empty and the role does not run empty ones."""
    out = SchedulerOutputs(StepType.PREFILL)
    for seq in s.sweep_waiting():
        lifecycle.release(s, seq)
        out.ignored.append(seq)
    s.order.sort(s.waiting, s.clock())
    budget, sum_k = s.config.prefill_budget, 0
    unfinished: list[Sequence] = []
    while s.waiting and budget > 0:
        seq = s.waiting[0]
        chunk = _plan(s, seq, budget, sum_k, first=not out.prefill)
        if chunk is _Refusal.STOP:
            break
        s.waiting.popleft()
        if isinstance(chunk, _Refusal):
            _ignore(s, seq, chunk, out)
            continue
        _commit(s, seq, chunk, out)
        budget -= chunk.q_len
        sum_k += chunk.q_start + chunk.q_len
        if not chunk.is_last:
            unfinished.append(seq)
            if s.policy.one_chunk_per_prefill:
                break
    # Back to the front: their KV advances whatever the results, so the next step may follow before
    # these are processed.
    s.waiting.extendleft(reversed(unfinished))
    if out.prefill or out.ignored or s.policy.empty_prefill_is_a_step:
        return s.emit(out)
    return None


def _plan(
    s: SchedulerState, seq: Sequence, budget: int, sum_k: int, first: bool
) -> _Chunk | _Refusal:
    if not seq.schedulable:
        return _Refusal.STOP
    hit = None
    if not seq.num_blocks:
        refusal = _never_fits(s, seq)
        if refusal is not None:
            return refusal
        hit = s.prefix.find(seq)
    needed = _blocks_needed(s, seq, hit)
    if not _has_room(s, seq, hit, needed) and not (first and _break_stall(s, seq, hit, needed)):
        return _Refusal.STOP
    if (
        not seq.num_blocks and hit is None
    ):  # a stalled fork gave up its prefix: plan it as a new prompt
        return _plan(s, seq, budget, sum_k, first)
    if not s.slots.num_free:
        return _Refusal.STOP
    q_start = seq.num_scheduled if hit is None else hit.num_tokens(s.config.block_size)
    q_len = _chunk_len(s, seq, q_start, budget, first)
    is_last = q_start + q_len == seq.num_tokens
    if q_len <= 0 or sum_k + q_start + q_len > s.config.prefill_max_sum_seqlen_k:
        return _Refusal.STOP
    if not is_last and not s.config.chunked_prefill:
        return _Refusal.STOP
    return _Chunk(q_start, q_len, is_last, needed, hit)


def _never_fits(s: SchedulerState, seq: Sequence) -> _Refusal | None:
    if seq.num_tokens > s.config.prompt_limit and not seq.num_output_tokens:
        return _Refusal.TOO_LONG
    return _Refusal.POOL_TOO_SMALL if s.config.pages(seq.num_tokens) > s.config.num_blocks else None


def _ignore(s: SchedulerState, seq: Sequence, refusal: _Refusal, out: SchedulerOutputs) -> None:
    # A prompt that is too long is the caller's mistake; one that outgrew the pool while running is
    # ours.
    reason = (
        "insufficient_system_resource"
        if refusal is _Refusal.POOL_TOO_SMALL and seq.num_output_tokens
        else None
    )
    lifecycle.set_finished(s, seq, SequenceStatus.FINISHED_IGNORED, reason)
    lifecycle.release(s, seq)
    out.ignored.append(seq)


def _blocks_needed(s: SchedulerState, seq: Sequence, hit: PrefixHit | None) -> int:
    have = seq.num_blocks if hit is None else hit.blocks.size
    return s.config.pages(seq.num_tokens) - have + s.must_clone(seq)


def _has_room(s: SchedulerState, seq: Sequence, hit: PrefixHit | None, needed: int) -> bool:
    free = s.blocks.num_free
    if hit is not None:
        free -= int(
            (s.blocks.ref_counts[hit.blocks] == 0).sum()
        )  # cached blocks it would revive are no longer free
        if seq.state_id < 0 and not s.states.has_room:
            return False
        free -= _reserved_growth(s, seq)
    return needed <= free


def _reserved_growth(s: SchedulerState, seq: Sequence) -> int:
    """Blocks the running sequences, and this one, are still expected to need (policy
    expected_output_fraction)."""
    fraction, t = s.config.expected_output_fraction, s.slots
    if not fraction or not t.num_active:
        return 0
    active = np.flatnonzero(t.active)
    expected = t.prompt_len[active] + np.ceil(
        (t.max_len[active] - t.prompt_len[active]) * fraction
    ).astype(np.int32)
    running = np.maximum(s.config.pages(expected) - t.pages[active], 0).sum()
    own_end = seq.prompt_len + int(np.ceil((s.max_len_of(seq) - seq.prompt_len) * fraction))
    own = max(s.config.pages(own_end) - s.config.pages(seq.num_tokens), 0)
    return int(running) + own


def _break_stall(s: SchedulerState, seq: Sequence, hit: PrefixHit | None, needed: int) -> bool:
    """When every held block belongs to sequences that wait for blocks, nobody will release any:
    take them from the last in the queue, at the end from the head itself. True if the head may be
    planned again."""
    queued = (SequenceStatus.WAITING, SequenceStatus.PROMPTED)
    if (
        s.slots.num_active
        or s.can_admit_prompted()
        or any(q.num_blocks and q.status not in queued for q in s.sequences)
    ):
        return False
    for other in [q for q in reversed(s.waiting) if q is not seq and q.num_blocks]:
        lifecycle.reset_for_recompute(s, other)
        if _has_room(s, seq, hit, _blocks_needed(s, seq, hit)):
            return False  # planned again in the next step, with up-to-date numbers
    if hit is None:
        lifecycle.reset_for_recompute(s, seq)
        return True
    return False


def _chunk_len(s: SchedulerState, seq: Sequence, q_start: int, budget: int, first: bool) -> int:
    """Tokens of the next chunk: the rest, the budget (aligned for context parallelism), the next
    checkpoint, no split image."""
    q_len = min(seq.num_tokens - q_start, s.config.align_down(budget))
    checkpoint = seq.next_checkpoint(q_start)
    if checkpoint is not None:
        q_len = min(q_len, checkpoint - q_start)
    image = seq.image_around(q_start + q_len)
    if image is None:
        return q_len
    if first and image.end - q_start <= budget:
        return image.end - q_start
    return image.start - q_start


def _commit(s: SchedulerState, seq: Sequence, chunk: _Chunk, out: SchedulerOutputs) -> None:
    if chunk.hit is not None:
        s.prefix.take(seq, chunk.hit)
        if seq.state_id < 0:
            seq.state_id = s.states.allocate()
            if seq.state_id >= 0:
                out.zero_states.append(seq.state_id)
    new = s.blocks.allocate(chunk.new_blocks)
    if seq.shares_last_block:
        new = clone_last_block(s, seq, new, out)
    if new.size:
        seq.own_blocks = np.concatenate([seq.own_blocks, new])
    seq.num_scheduled = chunk.q_start + chunk.q_len
    s.order.charge(seq, chunk.q_len)
    if chunk.is_last:
        lifecycle.admit(s, seq, out)
        s.slots.in_flight[seq.slot] += 1
        s.slots.max_num_tokens[seq.slot] += 1
    else:
        seq.chunks_in_flight += 1
    out.prefill.append(PrefillItem(seq, chunk.q_start, chunk.q_len, chunk.is_last, seq.epoch))


def clone_last_block(
    s: SchedulerState, seq: Sequence, new: np.ndarray, out: SchedulerOutputs
) -> np.ndarray:
    """Replaces the shared, half-written last block by new[0], unless it is no longer shared;
    returns the unused new blocks."""
    seq.shares_last_block = False
    last = seq.own_blocks[-1:].copy()
    if s.blocks.ref_counts[last[0]] == 1:
        s.blocks.uncache(int(last[0]))  # the source may have filled it before it left
        return new
    seq.own_blocks = np.concatenate([seq.own_blocks[:-1], new[:1]])
    out.clone_blocks.append((int(last[0]), int(new[0])))
    s.held_until_emit.append(last)
    return new[1:]
