"""process_outputs: turns the tokens of a step into longer, or ended, sequences."""

from __future__ import annotations

import numpy as np

from deepinfer_jax.scheduler import lifecycle
from deepinfer_jax.scheduler.outputs import PrefillItem, Processed, SchedulerOutputs
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import SchedulerState


def process_outputs(
    s: SchedulerState, outputs: SchedulerOutputs, token_ids: np.ndarray, num_new: np.ndarray | None
) -> Processed:
    """Commits a step's tokens. token_ids: i32 [n] or [n, 1 + num_speculative_tokens], rows in the
    order of outputs.prefill or outputs.slots (rows of unfinished chunks are ignored); num_new: i32
    [n] valid tokens per row (None: one each).

    Raises ValueError when the shapes do not match the step or num_new is not in [1, q_len].
    """
    tokens, counts = _validated(outputs, token_ids, num_new, s.config.num_speculative_tokens)
    if not outputs.is_empty:
        s.steps_in_flight -= 1
    if outputs.is_prefill:
        return _process_prefill(s, outputs, tokens)
    return _process_decode(s, outputs, tokens, counts)


def _validated(
    outputs: SchedulerOutputs,
    token_ids: np.ndarray,
    num_new: np.ndarray | None,
    num_speculative_tokens: int,
) -> tuple[np.ndarray, np.ndarray | None]:
    rows = len(outputs.prefill) if outputs.is_prefill else outputs.slots.size
    tokens = np.asarray(token_ids)
    tokens = tokens.reshape(rows, 1) if tokens.ndim == 1 and tokens.size == rows else tokens
    if rows and (
        tokens.ndim != 2
        or tokens.shape[0] != rows
        or not 1 <= tokens.shape[1] <= 1 + num_speculative_tokens
    ):
        raise ValueError(
            f"token_ids must be [{rows}, 1 .. {1 + num_speculative_tokens}], got {tokens.shape}"
        )
    if outputs.is_prefill or num_new is None or not rows or tokens.shape[1] == 1:
        return tokens, None
    counts = np.asarray(num_new)
    if (
        counts.shape != (rows,)
        or (counts < 1).any()
        or (counts > outputs.q_lens).any()
        or counts.max() > tokens.shape[1]
    ):
        raise ValueError(
            f"num_new must lie in [1, q_len] per row: num_new={counts}, q_lens={outputs.q_lens},"
            f" token_ids {tokens.shape}"
        )
    return tokens, counts


def _process_prefill(s: SchedulerState, outputs: SchedulerOutputs, tokens: np.ndarray) -> Processed:
    rows, slots = [], []
    for row, item in enumerate(outputs.prefill):
        if _advance_chunk(s, item):
            rows.append(row)
            slots.append(item.seq.slot)
    accepted = np.zeros(len(outputs.prefill), np.int32)
    finished: list[Sequence] = []
    if rows:
        live = np.array(slots, np.intp)
        accepted[rows] = 1
        s.slots.in_flight[live] -= 1
        _end(s, live, s.slots.append(live, tokens[rows, 0]), finished)
    return Processed(finished, accepted)


def _advance_chunk(s: SchedulerState, item: PrefillItem) -> bool:
    """Books a chunk's KV; True if its sampled token counts."""
    seq = item.seq
    if item.epoch != seq.epoch:
        return False  # preempted in flight
    if not item.is_last:
        seq.chunks_in_flight -= 1
    elif seq.is_finished and seq.slot >= 0:
        s.slots.in_flight[seq.slot] -= 1
    if seq.is_finished:
        return False
    seq.num_prefilled = item.kv_len
    s.prefix.register(seq)
    seq.decoding = item.is_last
    return item.is_last


def _process_decode(
    s: SchedulerState, outputs: SchedulerOutputs, tokens: np.ndarray, counts: np.ndarray | None
) -> Processed:
    t = s.slots
    slots = outputs.slots.astype(np.intp)
    finished: list[Sequence] = []
    if not slots.size:
        return Processed(finished, np.zeros(0, np.int32))
    same = t.serial[slots] == outputs.serials  # the slot has not changed hands since
    rows = None
    if not same.all():
        rows = np.flatnonzero(same)
        slots = slots[rows]
    t.in_flight[slots] -= 1
    active = t.active[slots]
    if not active.all():  # ended with an earlier step: these tokens are surplus
        rows = np.flatnonzero(active) if rows is None else rows[active]
        slots = slots[active]
    if rows is not None:
        tokens = tokens[rows]
        counts = None if counts is None else counts[rows]
    accepted = _append_tokens(s, slots, tokens, counts, finished)
    if s.config.num_speculative_tokens:
        q_lens = outputs.q_lens if rows is None else outputs.q_lens[rows]
        t.max_num_tokens[slots] -= q_lens - accepted
    if rows is None:
        return Processed(finished, accepted)
    by_row = np.zeros(outputs.slots.size, np.int32)
    by_row[rows] = accepted
    return Processed(finished, by_row)


def _append_tokens(
    s: SchedulerState,
    slots: np.ndarray,
    tokens: np.ndarray,
    counts: np.ndarray | None,
    finished: list[Sequence],
) -> np.ndarray:
    """Appends counts[i] tokens of row i one by one, with the stop check after each; i32 [n] tokens
    really appended."""
    accepted = np.ones(slots.size, np.int32)
    if not slots.size:
        return accepted
    done = s.slots.append(slots, tokens[:, 0])
    if counts is not None:
        for column in range(1, int(counts.max())):
            rows = np.flatnonzero((counts > column) & ~done)
            if not rows.size:
                break
            accepted[rows] += 1
            done[rows] = s.slots.append(slots[rows], tokens[rows, column])
    _end(s, slots, done, finished)
    return accepted


def _end(s: SchedulerState, slots: np.ndarray, done: np.ndarray, finished: list[Sequence]) -> None:
    if not done.any():
        return
    for slot in slots[done].tolist():
        seq = s.slots.seq_at(slot)
        last = int(seq.token_ids[-1])
        if seq.stops_at(last):
            reason = None if last in seq.eos_token_ids and not seq.ignore_eos else last
            lifecycle.finish(s, seq, SequenceStatus.FINISHED_STOPPED, stop_reason=reason)
        else:
            lifecycle.finish(s, seq, SequenceStatus.FINISHED_LENGTH)
        finished.append(seq)
