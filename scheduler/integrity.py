"""check_integrity: every block, slot and state row has exactly the holders that the
sequences say."""

from __future__ import annotations

import numpy as np

from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import SchedulerState


def check_integrity(s: SchedulerState) -> None:
    refs = np.zeros(s.config.num_blocks, np.int32)
    for seq in s.sequences:
        np.add.at(refs, seq.block_ids, 1)
        _check_sequence(s, seq)
    for blocks in s.held_until_emit:
        np.add.at(refs, blocks, 1)
    s.blocks.check_integrity(refs)
    s.states.check_integrity([seq.state_id for seq in s.sequences if seq.state_id >= 0])
    _check_queues(s)
    _check_slots(s)


def _require(condition: bool, message: str, *state: object) -> None:
    if not condition:
        raise AssertionError(" ".join([message, *map(repr, state)]))


def _check_sequence(s: SchedulerState, seq: Sequence) -> None:
    _require(0 <= seq.num_cached <= seq.num_tokens, "KV counter outside [0, tokens]:", seq)
    _require(seq.num_in_flight >= 0, "negative steps in flight:", seq, seq.num_in_flight)
    _require(
        seq.num_blocks == len(set(seq.block_ids.tolist())),
        "a block occurs twice in a block table:",
        seq,
        seq.block_ids,
    )
    if not seq.is_finished and seq.num_blocks:
        _require(
            s.config.pages(seq.num_cached) <= seq.num_blocks,
            "computed tokens without a block:",
            seq,
        )
    if seq.status is SequenceStatus.RUNNING:
        t, slot = s.slots, seq.slot
        _require(
            slot >= 0 and t.seq_at(slot) is seq and bool(t.active[slot]),
            "running without its slot:",
            seq,
        )
        pending = int(t.max_num_tokens[slot] - t.num_tokens[slot])
        most = int(t.in_flight[slot]) * (1 + s.config.num_speculative_tokens)
        _require(
            int(t.in_flight[slot]) <= pending <= most,
            "optimistic length outside its bounds:",
            seq,
            pending,
            most,
        )
        _require(
            int(t.capacity[slot]) == seq.num_blocks * s.config.block_size,
            "capacity differs from the block table:",
            seq,
        )
        _require(
            bool(t.max_num_tokens[slot] - 1 <= t.capacity[slot]),
            "tokens in flight without a block:",
            seq,
        )


def _check_queues(s: SchedulerState) -> None:
    ended_waiting = 0
    for seq in s.waiting:
        ended_waiting += seq.is_finished
        _require(seq.is_finished or seq.status is SequenceStatus.WAITING, "in `waiting`:", seq)
    _require(
        ended_waiting == s.num_ended_waiting,
        "ended sequences in `waiting`:",
        ended_waiting,
        s.num_ended_waiting,
    )
    for name, queue, status in (
        ("prompted", s.prompted, SequenceStatus.PROMPTED),
        ("reserved", s.reserved.values(), SequenceStatus.RESERVED),
        ("detached", s.detached.values(), SequenceStatus.DETACHED),
    ):
        for seq in queue:
            _require(
                seq.status is status or (seq.is_finished and name != "prompted"),
                f"in `{name}`:",
                seq,
            )
    queued = [id(seq) for seq in (*s.waiting, *s.prompted)]
    _require(len(set(queued)) == len(queued), "a sequence is queued twice")
    _require(
        all(s.registered.get(seq.request_id) is seq for seq in (*s.waiting, *s.prompted, *s.ended)),
        "a queued sequence is not registered",
    )
    for seq in s.sequences:
        _require(
            seq.status is not SequenceStatus.PROMPTED or seq in s.prompted,
            "lost from `prompted`:",
            seq,
        )


def _check_slots(s: SchedulerState) -> None:
    t = s.slots
    held = {seq.slot for seq in s.sequences if seq.slot >= 0}
    free = set(t.free_slots)
    _require(
        len(free) == len(t.free_slots) and not held & free and len(held) + len(free) == t.num_slots,
        "slots held/free:",
        held,
        free,
    )
    _require(
        t.num_active == int(t.active.sum()), "active slots:", t.num_active, int(t.active.sum())
    )
    running = {seq.slot for seq in s.sequences if seq.status is SequenceStatus.RUNNING}
    _require(
        running == set(np.flatnonzero(t.active).tolist()),
        "active slots and running sequences differ:",
        running,
    )
    stale = [slot for slot in free if t.pages[slot]]
    _require(not stale, "free slots with blocks:", stale)
