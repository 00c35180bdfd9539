"""The hand-over's control plane under faults, on a fake clock: nothing hangs, nothing leaks, one
result each, with its reason."""

from __future__ import annotations

import heapq
import logging
from collections import Counter

import pytest
from handoff_fuzz import check_results, episode, fuzz
from handoff_world import Faults, World

from deepinfer_jax.disagg.messages import Granted
from deepinfer_jax.disagg.protocol import (
    LEGAL_TRANSITIONS,
    Handoff,
    HandoffState,
    IllegalTransition,
)
from deepinfer_jax.disagg.sender import Sender
from deepinfer_jax.scheduler.routing.ids import AttemptId

S = HandoffState
A1 = AttemptId("a", 0, 1).handoff(1)
PATH = [S.RESERVED, S.PREPARED, S.SENDING, S.DELIVERED, S.ACKED]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# ---- the table -----------------------------------------------------------------------------------


def test_only_the_written_transitions_are_legal():
    for state in S:
        for target in S:
            h = Handoff(A1, "P", "C", 1.0, state)
            expected = (
                (PATH.index(target) == PATH.index(state) + 1 if target in PATH else True)
                if state in PATH[:-1]
                else False
            )
            assert (target in LEGAL_TRANSITIONS[state]) == expected, (state, target)
            if expected:
                h.advance(target, 2.0)
                assert h.state is target and h.times[target] == 2.0
            else:
                with pytest.raises(
                    IllegalTransition, match=rf"hand-over {A1}: {state.name} -> {target.name}"
                ):
                    h.advance(target, 2.0)


def test_one_owner_at_a_time_and_completion_is_idempotent():
    h = Handoff(A1, "P", "C", 1.0)
    for state in PATH[1:-1]:
        assert h.owner == "P"
        h.advance(state, 0.0)
    assert h.complete(S.ACKED, 5.0) and h.owner == "C"
    assert (
        not h.complete(S.ACKED, 6.0)
        and not h.complete(S.FAILED, 7.0, "late")
        and h.state is S.ACKED
        and h.reason is None
    )
    failed = Handoff(AttemptId("b", 0, 1).handoff(1), "P", "C", 1.0)
    assert (
        failed.complete(S.FAILED, 1.0, "why")
        and not failed.complete(S.FAILED, 1.0, "again")
        and failed.reason == "why"
    )
    assert failed.owner is None


# ---- faults at every state -----------------------------------------------------------------------


def run(world: World, faulty=None) -> World:
    """Twelve requests; `faulty` is told of every state any hand-over record takes: (world, handoff,
    on which side)."""
    advance = Handoff.advance
    created = Sender._on_message

    def spy(self, state, now, *args, **kwargs):
        advance(self, state, now, *args, **kwargs)
        if faulty is not None:
            faulty(world, self)

    def spy_created(self, name, message):
        created(self, name, message)
        if isinstance(message.body, Granted) and faulty is not None:
            for out in self.outgoing.values():
                if out.handoff is not None and out.handoff.handoff_id == message.body.handoff:
                    faulty(world, out.handoff)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handoff, "advance", spy)
        patch.setattr(Sender, "_on_message", spy_created)
        for i in range(12):
            world.add(
                f"r{i}", [(5 * i + j) % 23 + 2 for j in range(3 + 3 * i)], 6, stream=i % 3 == 2
            )
            world.tick()
        world.settle()
    return world


@pytest.mark.parametrize(
    "fault", ["kill source", "kill target", "stall source", "stall target", "abort"]
)
@pytest.mark.parametrize("state", PATH, ids=lambda s: s.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_fault_at_every_state(state, fault, seed):
    struck: dict = {}

    def strike(world, handoff):
        if (
            handoff.state is not state
            or struck
            or not handoff.handoff_id.attempt.request.startswith("r5")
        ):
            return
        struck.update(at=world.now, id=handoff.handoff_id)
        name = handoff.source if fault.endswith("source") else handoff.target
        if fault.startswith("stall"):
            world.workers[name].stalled_until = world.now + 100
        elif fault.startswith("kill"):
            world.workers[name].commands.append(lambda: world.crash(name))
        elif "r5" in world.requests:
            world.aborted.add("r5")
            world.workers[name].commands.append(lambda: world.coordinator.abort_request("r5"))

    world = run(World(seed), strike)
    assert struck
    counts: Counter = Counter()
    world.aborted &= {"r5"} if world.results["r5"].outputs[0].finish_reason == "abort" else set()
    check_results(world, counts)
    others = {i: o.outputs[0] for i, o in world.results.items() if i != "r5"}
    assert all(
        o.finish_reason == "length" or world.prompts[i].params.output_kind.name == "CUMULATIVE"
        for i, o in others.items()
    ), others
    assert world.now - struck["at"] < 4 * world.handoff.timeout + 100, "hung past the deadline"
    final = world.results["r5"].outputs[0]
    # r5 streams: once tokens were given away a crash ends it, with the reason
    assert final.finish_reason in ("length", "abort") or (
        final.finish_reason == "error" and "killed" in final.stop_reason
    ), final


def test_without_faults_everything_is_answered_in_full():
    world = run(World(3))
    assert {o.outputs[0].finish_reason for o in world.results.values()} == {"length"}
    assert all(len(o.outputs[0].token_ids) == 6 for o in world.results.values())


def test_no_completion_engine_left_gives_the_reason_at_once():
    world = World(0, completion=1)
    for i in range(4):
        world.add(f"r{i}", [2, 3, 4, 5, 6, 7], 8)
    world.tick()
    world.crash("C0", "out of memory")
    for _ in range(3):
        world.tick()
    reasons = [o.outputs[0].stop_reason for o in world.results.values()]
    assert len(reasons) == 4 and all("C0 out of memory" in r for r in reasons), reasons
    with pytest.raises(RuntimeError, match="no completion engine is left: C0 out of memory"):
        world.coordinator.submit(world.prompts["r0"], 48)
    world.settle()


def test_a_prompt_engine_that_dies_leaves_no_reservation():
    world = World(0, prompt=1, completion=1)
    world.add("r0", [(j % 23) + 2 for j in range(40)], 6)  # three chunks
    while not world.workers["C0"].engine.receiver.incoming:
        world.tick()
    world.crash("P0")
    world.tick()
    assert (
        not world.workers["C0"].engine.receiver.incoming and not world.workers["C0"].engine.reserved
    )
    assert "P0 killed" in world.results["r0"].outputs[0].stop_reason
    world.settle()


def test_a_silent_prompt_engine_loses_its_reservations_at_the_deadline():
    world = World(0, prompt=1, completion=1)
    world.add("r0", [(j % 23) + 2 for j in range(40)], 6)
    while not world.workers["C0"].engine.receiver.incoming:
        world.tick()
    start, world.workers["P0"].stalled_until = world.now, 1e9
    while world.workers["C0"].engine.receiver.incoming:
        world.tick()
    assert world.now - start <= world.handoff.timeout + 2
    assert world.workers["C0"].engine.schedulers[0].blocks.num_used == 0
    world.settle()
    assert world.results["r0"].outputs[0].finish_reason == "length"


def test_a_full_completion_engine_refuses_before_any_byte_moves():
    world = World(2, prompt=1, completion=1, ce_blocks=12)  # room for one long request per rank
    moved: list = []
    post = world.post
    world.post = lambda link, message: (moved.append(message), post(link, message))
    for i in range(6):
        world.add(f"r{i}", [(i + j) % 23 + 2 for j in range(30)], 12)
    world.settle()
    granted = set()
    for message in moved:
        if isinstance(message.body, Granted):
            granted.add(message.body.handoff)
        for segment in getattr(message.body, "segments", ()):
            assert segment.handoff in granted, "bytes before the reservation"
    assert {o.outputs[0].finish_reason for o in world.results.values()} == {"length"}


def test_what_can_never_fit_is_refused_with_its_numbers():
    world = World(0, completion=1)
    with pytest.raises(
        ValueError,
        match=r"request 'r0': needs KV for \d+ tokens, the largest completion engine holds",
    ):
        world.router.completion["C0"].capacity = type(world.router.completion["C0"].capacity)(4, 20)
        world.add("r0", [2] * 30, 12)
    world.prompts.clear()
    world.settle()


def add_eight(world: World) -> None:
    """Eight requests, one per tick; the sixth is aborted at once."""
    for i in range(8):
        world.add(f"r{i}", [(i + j) % 23 + 2 for j in range(20)], 6)
        world.tick()
        if i == 5 and "r5" in world.requests:
            world.aborted.add("r5")
            world.coordinator.abort_request("r5")


@pytest.mark.parametrize(
    "kind", ["ack", "granted", "deliver", "pages", "reserve", "cancel", "failed"]
)
def test_duplicate_and_late_messages_change_nothing(kind):
    world = World(4, completion=1)
    post, kept = world.post, []

    def doubled(link, message):
        post(link, message)
        if type(message.body).__name__.lower() == kind:
            post(link, message)
            kept.append((link, message))

    world.post = doubled
    add_eight(world)
    for _ in range(60):
        world.tick()
    for link, message in kept:
        link.inbox.append(message)  # and once more, long after everything has ended
    world.settle()
    check_results(world, Counter())
    reasons = Counter(o.outputs[0].finish_reason for o in world.results.values())
    assert reasons["length"] >= 7 and reasons["error"] == 0, reasons


@pytest.mark.parametrize("kind", ["ack", "granted", "deliver", "pages", "reserve", "cancel"])
def test_messages_may_be_overtaken(kind):
    world = World(4, completion=1)
    post = world.post

    def late(link, message):
        if type(message.body).__name__.lower() == kind:
            heapq.heappush(world.in_transit, (world.now + 3.0, next(world.serial), link, message))
        else:
            post(link, message)

    world.post = late
    add_eight(world)
    world.settle()
    check_results(world, Counter())
    reasons = Counter(o.outputs[0].finish_reason for o in world.results.values())
    assert reasons["length"] >= 7 and reasons["error"] == 0, reasons


def test_an_id_used_again_does_not_find_its_old_success():
    world = World(8, prompt=1, completion=1)
    for _ in range(3):
        for request_id in ("same", "a/b#c@d"):
            world.add(request_id, [3, 4, 5, 6, 7, 8], 5)
        start = world.now
        while world.requests:
            world.tick()
        assert world.now - start < world.handoff.timeout
        assert (
            all(o.outputs[0].finish_reason == "length" for o in world.results.values())
            and len(world.results) == 2
        )
        world.results.clear()
    world.prompts.clear()
    world.settle()


def test_a_cancelled_request_frees_both_sides():
    for ticks in range(12):
        world = World(5, prompt=1, completion=1)
        world.add("r0", [(j % 23) + 2 for j in range(40)], 8)
        for _ in range(ticks):
            world.tick()
        if "r0" in world.requests:
            world.aborted.add("r0")
            world.coordinator.abort_request("r0")
        for _ in range(4):
            world.tick()
        assert not world.held(), f"aborted after {ticks} ticks"
        world.settle()


def test_back_pressure_bounds_what_a_prompt_engine_keeps():
    world = World(
        6, prompt=1, completion=1, ce_blocks=12, max_held_requests=3, max_queued_tokens=40
    )
    for i in range(20):
        world.add(f"r{i}", [(i + j) % 23 + 2 for j in range(20)], 12)
    most = 0
    while world.requests:
        world.tick()
        most = max(most, sum(1 for s in world.workers["P0"].engine.schedulers for _ in s.sequences))
    assert most <= 8, "prompts were prefilled without anybody to take them"
    world.settle()


def test_a_thousand_requests_under_random_faults():
    counts = fuzz(first_seed=1000, requests=1000)
    assert counts["length"] > 500 and counts["error"] < 400, counts


def test_an_engine_dies_that_answers_a_hand_over_which_was_taken_back():
    """Its acknowledgement was late: the source has taken the request back, the caller has tokens,
    so only the dead engine could have gone on."""
    assert episode(98807809)["error"]


def test_faults_do_happen():
    world = World(7, Faults(drop=0.3, crash=0.05))
    for i in range(30):
        world.add(f"r{i}", [2, 3, 4, 5, 6], 5)
        world.tick()
    world.settle()
    assert world.router.counters["retries"] or world.router.counters["failed"]
