"""What happens to a sequence between its arrival and its end: registered, bound to a slot, running,
preempted, ended, released."""

from __future__ import annotations

import numpy as np

from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.sequence import FINISH_REASONS, Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import SchedulerState

# ---- in


def add_request(s: SchedulerState, seq: Sequence, enqueue: bool = True) -> None:
    """Takes a request in. enqueue False only registers it (a hand-over reserves and queues it
    later).

    Raises ValueError naming the request: duplicate id, no prefill in this role, an image larger
    than a step, checkpoints without chunking.
    """
    if enqueue and not s.policy.does_prefill:
        raise ValueError(
            f"request {seq.request_id!r}: a {s.config.role.name} engine takes requests by"
            " reserve() + enqueue_prompted()"
        )
    register(s, seq)
    if enqueue:
        enqueue_waiting(s, seq)


def enqueue_waiting(s: SchedulerState, seq: Sequence) -> None:
    """Puts a registered sequence at the end of `waiting`."""
    seq.enqueue_time = s.clock()
    s.waiting.append(seq)
    s.order.arrived(seq)


def register(s: SchedulerState, seq: Sequence) -> None:
    """The id is this sequence's from now on. Raises ValueError as add_request() does."""
    if seq.request_id in s.registered:
        raise ValueError(
            f"request {seq.request_id!r}: this id is already in use"
            f" ({s.registered[seq.request_id].status.name})"
        )
    if seq.status is not SequenceStatus.WAITING or seq.num_blocks:
        raise ValueError(
            f"request {seq.request_id!r}: cannot add a sequence in status {seq.status.name}"
            f" with {seq.num_blocks} blocks"
        )
    if s.policy.does_prefill:
        _check_chunking(s, seq)
    if s.policy.reserves_output_storage:
        longest = max(seq.prompt_len, s.config.max_model_len) + 1
        seq.reserve_storage(min(seq.prompt_len + seq.max_tokens, longest))
    s.registered[seq.request_id] = seq


def _check_chunking(s: SchedulerState, seq: Sequence) -> None:
    if seq.chunk_checkpoints and not s.config.chunked_prefill:
        raise ValueError(
            f"request {seq.request_id!r}: chunk_checkpoints {seq.chunk_checkpoints} need"
            " chunked_prefill"
        )
    for span in seq.image_spans:
        if span.end - span.start > s.config.prefill_budget:
            raise ValueError(
                f"request {seq.request_id!r}: image [{span.start}, {span.end}) has"
                f" {span.end - span.start} tokens, more than a step holds"
                f" ({s.config.prefill_budget})"
            )


# ---- running


def bind(s: SchedulerState, seq: Sequence) -> None:
    """Gives the sequence a free slot, which is also its draft slot."""
    drafts = s.config.num_speculative_tokens if s.policy.has_draft_pool else 0
    s.slots.bind(seq, s.max_len_of(seq), drafts)


def admit(s: SchedulerState, seq: Sequence, out: SchedulerOutputs) -> None:
    """Makes a sequence RUNNING, in the slot it has or in a free one."""
    if seq.slot < 0:
        bind(s, seq)
    seq.status = SequenceStatus.RUNNING
    s.slots.activate(seq.slot)
    out.admitted.append(seq)


def preempt(s: SchedulerState, seq: Sequence, out: SchedulerOutputs) -> None:
    """Takes the blocks of a running or prompted sequence away: stopped, or recomputed later."""
    seq.num_preemptions += 1
    out.preempted.append(seq)
    if seq.status is SequenceStatus.PROMPTED:
        s.prompted.remove(seq)
    if s.config.stop_preempted_request or seq.grammar_active:
        if seq.slot >= 0:
            s.slots.deactivate(seq.slot)
        release_memory(s, seq)
        set_finished(s, seq, SequenceStatus.FINISHED_PREEMPTED)
        s.ended.append(seq)
    else:
        reset_for_recompute(s, seq)
        _push_front(s, seq)


def reset_for_recompute(s: SchedulerState, seq: Sequence) -> None:
    """Back to nothing computed, all known tokens kept: they are prefilled again as if they were the
    prompt."""
    release_memory(s, seq)
    if seq.slot >= 0:
        s.slots.unbind(seq, keep_blocks=False)
    seq.num_prefilled = seq.num_scheduled = seq.chunks_in_flight = 0
    seq.decoding = seq.shares_last_block = False
    seq.epoch += 1
    s.prefix.forget(seq)
    seq.status = SequenceStatus.WAITING


def _push_front(s: SchedulerState, seq: Sequence) -> None:
    """Front of `waiting`, yet behind those that already hold blocks: ahead of them it could wait
    for their blocks for ever."""
    position = 0
    for other in s.waiting:
        if not other.num_blocks:
            break
        position += 1
    s.waiting.insert(position, seq)


# ---- out


def finish(
    s: SchedulerState,
    seq: Sequence,
    status: SequenceStatus,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
) -> bool:
    """Ends a sequence (stop string found, abort, failure); False if it had ended. finish_reason
    None: the status' own. Raises ValueError naming the request for a status that is no end or a
    sequence of another scheduler."""
    if not status.is_finished:
        raise ValueError(f"request {seq.request_id!r}: {status.name} is not a finished status")
    if seq.is_finished:
        return False
    if s.registered.get(seq.request_id) is not seq:
        raise ValueError(f"request {seq.request_id!r}: not in this scheduler")
    if seq.status is SequenceStatus.RUNNING:
        s.slots.deactivate(seq.slot)
        s.ended.append(seq)
    elif seq.status is SequenceStatus.PROMPTED:
        s.prompted.remove(seq)
        s.ended.append(seq)
    elif seq.status is SequenceStatus.WAITING:
        s.num_ended_waiting += seq in s.waiting
    set_finished(s, seq, status, finish_reason, stop_reason)
    return True


def set_finished(
    s: SchedulerState,
    seq: Sequence,
    status: SequenceStatus,
    reason: str | None = None,
    stop_reason: int | str | None = None,
) -> None:
    """Writes the end down; queues and slot are the caller's business."""
    seq.status = status
    seq.finish_reason = reason or FINISH_REASONS[status]
    seq.stop_reason = stop_reason
    s.order.ended(seq)


def free_seq(s: SchedulerState, seq: Sequence) -> bool:
    """Releases everything a finished sequence holds; its slot and id may be used again. False if
    that was done before.

    Raises ValueError for a sequence that has not finished or whose blocks a hand-over still owns.
    """
    if s.registered.get(seq.request_id) is not seq:
        return False
    if not seq.is_finished:
        raise ValueError(
            f"request {seq.request_id!r}: cannot free a sequence in status {seq.status.name}"
        )
    if seq.request_id in s.reserved or seq.request_id in s.detached:
        raise ValueError(
            f"request {seq.request_id!r}: a hand-over owns its blocks: cancel_reservation() or"
            " release_detached() it"
        )
    if seq in s.ended:
        s.ended.remove(seq)
    elif s.num_ended_waiting and seq in s.waiting:
        s.waiting.remove(seq)
        s.num_ended_waiting -= 1
    release(s, seq)
    return True


def release(s: SchedulerState, seq: Sequence) -> None:
    """Gives back blocks, state row, slot and id."""
    release_memory(s, seq)
    if seq.slot >= 0:
        s.slots.unbind(seq, keep_blocks=False)
    del s.registered[seq.request_id]


def release_memory(s: SchedulerState, seq: Sequence) -> None:
    """Gives back blocks (what is computed stays findable in the prefix cache) and the state row."""
    s.prefix.register(seq)
    s.blocks.unpin(seq.block_ids)
    if seq.slot >= 0:
        s.slots.drop_blocks(seq.slot)
    seq.own_blocks = np.empty(0, np.int32)
    if seq.state_id >= 0:
        s.new_clone_states = [pair for pair in s.new_clone_states if pair[1] != seq.state_id]
        s.states.unpin(seq.state_id)
        seq.state_id = -1
