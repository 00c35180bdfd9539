"""Router: balance, affinity, back-pressure, retries; exactly one result per request
whatever fails."""

from __future__ import annotations

import random

import pytest

from deepinfer_jax.scheduler.routing.config import Capacity, RouterConfig
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, PartId, parse_id
from deepinfer_jax.scheduler.routing.router import Router

CAPACITY = Capacity(4, 1000)


def make(p=2, c=2, capacity=CAPACITY, **config) -> Router:
    return Router(
        [f"P{i}" for i in range(p)],
        {f"C{i}": capacity for i in range(c)},
        RouterConfig(**{"affinity_block": 0} | config),
    )


def prompt(length, first=0):
    return [(first + i) % 97 for i in range(length)]


def to_decode(router, attempt):
    placed = router.assign_decode(attempt)
    router.prefilled(attempt)
    router.delivered(attempt)
    return placed


def test_prompts_go_where_they_finish_first():
    r = make()
    for i, length in enumerate([900, 100, 100, 100]):
        r.add(PartId(f"r{i}"), prompt(length, i), 8)
    assert [a.prompt_engine for a in r.dispatch()] == ["P0", "P1", "P1", "P1"]
    r.prefill_progress(AttemptId("r0", 0, 1), 850)
    r.add(PartId("r4"), prompt(100), 8)
    assert r.dispatch()[0].prompt_engine == "P0"
    r.check_integrity()


def test_cost_is_learned_per_context_length():
    r = make(length_buckets=(100,), seconds_per_token=0.001, cost_smoothing=1.0)
    r.add(PartId("long"), prompt(200), 1)
    r.add(PartId("short"), prompt(100), 1)
    r.dispatch()
    assert r.queue_seconds("P0") == pytest.approx(0.2)
    r.prefill_progress(
        AttemptId("long", 0, 1), 100, seconds=1.0
    )  # ten times slower than thought, for long contexts only
    assert r.queue_seconds("P0") == pytest.approx(1.0) and r.queue_seconds("P1") == pytest.approx(
        0.1
    )


def test_prefix_affinity_beats_an_equal_queue_and_yields_to_a_long_one():
    r = make(affinity_block=16)
    shared = prompt(160)
    r.add(PartId("a"), shared, 1)
    r.dispatch()
    r.add(PartId("other"), prompt(160, 50), 1)
    assert r.dispatch()[0].prompt_engine == "P1"
    for attempt in (AttemptId("a", 0, 1), AttemptId("other", 0, 1)):
        r.prefilled(attempt)
    r.add(PartId("b"), [*shared, 1, 2, 3], 1)
    assert r.dispatch()[0].prompt_engine == "P0"
    r.add(PartId("c"), [*shared, 4], 1)
    r.add(PartId("busy"), prompt(160, 70), 1)
    r.dispatch()
    assert r.prompt["P0"].queued_tokens < 163


def test_decode_balances_both_dimensions():
    r = Router(
        ["P0"],
        {"many": Capacity(100, 1000), "few": Capacity(2, 100_000)},
        RouterConfig(affinity_block=0),
    )
    for i, length in enumerate([500, 500, 500, 10, 10]):
        r.add(PartId(f"r{i}"), prompt(length), 100)
    r.dispatch()
    assert [r.assign_decode(AttemptId(f"r{i}", 0, 1)) for i in range(5)] == [
        "few",
        "many",
        "few",
        "many",
        "many",
    ]
    assert r.assign_decode(AttemptId("r0", 0, 1)) == "few", "placing twice changes nothing"
    r.check_integrity()


def test_back_pressure_stops_prefilling_until_kv_leaves():
    r = make(p=1, c=1, capacity=Capacity(1, 1000), max_held_requests=2)
    for i in range(4):
        r.add(PartId(f"r{i}"), prompt(10), 8)
        for a in r.dispatch():
            r.prefilled(a.attempt)
    assert (
        r.assign_decode(AttemptId("r0", 0, 1)) == "C0"
        and r.assign_decode(AttemptId("r1", 0, 1)) is None
    )
    assert len(r.queue) == 2 and not r.dispatch()
    r.delivered(AttemptId("r0", 0, 1))
    assert [a.part.request for a in r.dispatch()] == ["r2"]
    assert r.assign_decode(AttemptId("r1", 0, 1)) is None
    assert (
        r.finish(AttemptId("r0", 0, 1)) == PartId("r0")
        and r.assign_decode(AttemptId("r1", 0, 1)) == "C0"
    )
    r.check_integrity()


def test_refusal_by_one_completion_engine_goes_to_another():
    r = make()
    r.add(PartId("a"), prompt(10), 8)
    r.dispatch()
    first = r.assign_decode(AttemptId("a", 0, 1))
    r.release_decode(AttemptId("a", 0, 1))
    assert r.assign_decode(AttemptId("a", 0, 1), exclude=[first]) not in (first, None)
    r.check_integrity()


def test_retry_gets_a_new_id_and_the_old_one_finds_nothing():
    r = make()
    r.add(PartId("a"), prompt(10), 8)
    (first,) = r.dispatch()
    r.assign_decode(first.attempt)
    (verdict,) = r.engine_failed(first.prompt_engine, "killed")
    assert verdict.retry and verdict.engines_to_notify == ("C0",) and verdict.reason == "killed"
    assert r.finish(first.attempt) is None and r.fail(first.attempt, "late") is None
    (second,) = r.dispatch()
    assert second.attempt == AttemptId("a", 0, 2) and second.prompt_engine != first.prompt_engine
    assert r.finish(first.attempt) is None and r.assign_decode(first.attempt) is None
    r.prefilled(first.attempt)
    assert (
        to_decode(r, AttemptId("a", 0, 2))
        and r.finish(AttemptId("a", 0, 2)) == PartId("a")
        and r.finish(AttemptId("a", 0, 2)) is None
    )
    r.check_integrity()


def test_gives_up_after_max_attempts():
    r = make(max_attempts=2)
    r.add(PartId("a"), prompt(10), 8)
    assert r.fail(r.dispatch()[0].attempt, "x").retry
    assert not r.fail(r.dispatch()[0].attempt, "y").retry and not r.jobs


def test_requests_wait_while_a_role_is_missing_and_are_named():
    r = make()
    r.add(PartId("b"), prompt(10), 8)
    r.dispatch()
    for name in ("P0", "P1"):
        r.engine_failed(name, "gone")
    assert r.missing() == ("prompt",) and [j.part.request for j in r.starved()] == ["b"]
    assert not r.dispatch()
    r.engine_recovered("P0")
    assert not r.missing() and not r.starved() and r.dispatch()[0].prompt_engine == "P0"
    for name in ("C0", "C1"):
        r.leave(name, "gone")
    assert r.missing() == ("completion",) and [j.part.request for j in r.starved()] == ["b"]
    r.join("C2", CAPACITY)
    assert r.assign_decode(AttemptId("b", 0, 2)) == "C2"
    r.check_integrity()


def test_a_router_without_engines_takes_requests_and_waits():
    r = Router(config=RouterConfig(affinity_block=0))
    r.needs_completion = False
    r.add(PartId("a"), prompt(10), 8)
    assert r.missing() == ("normal",) and not r.dispatch()
    r.join("N")
    assert r.dispatch()[0].prompt_engine == "N"
    r.drain("N")
    assert r.missing() == ("normal",) and r.finish(AttemptId("a", 0, 1)) == PartId("a")
    assert r.leave("N", "gone") == [] == r.leave("N", "gone")


def test_a_request_whose_engines_die_is_not_given_to_a_third():
    r = make(p=3, max_attempts=9)
    for request in ("pill", "other"):
        r.add(PartId(request), prompt(10), 8)
    victims = []
    for _ in range(2):
        by_request = {a.part.request: a.prompt_engine for a in r.dispatch()}
        victims.append(by_request["pill"])
        (verdict,) = [v for v in r.engine_failed(victims[-1], "died") if v.part == PartId("pill")]
    assert len(set(victims)) == 2 and not verdict.retry and "died" in verdict.reason
    assert "2 engines have died while they held this request" in verdict.reason
    assert list(r.jobs) == [PartId("other")] and r.counters["poison"] == 1
    r.check_integrity()


def test_tokens_given_to_the_caller_forbid_a_retry():
    r = make()
    r.add(PartId("a"), prompt(10), 8)
    attempt = r.dispatch()[0].attempt
    to_decode(r, attempt)
    r.no_retry(attempt)
    assert not r.engine_failed("C0", "killed")[0].retry
    r.check_integrity()


def test_cancel_reaches_both_sides_at_every_stage():
    r = make()
    assert r.cancel(PartId("nobody")) == []
    r.add(PartId("queued"), prompt(5), 4)
    assert r.cancel(PartId("queued")) == [] and not r.queue
    r.add(PartId("a"), prompt(5), 4)
    r.dispatch()
    assert r.cancel(PartId("a")) == [("P0", AttemptId("a", 0, 1))]
    r.add(PartId("b"), prompt(5), 4)
    r.dispatch()
    r.assign_decode(AttemptId("b", 0, 1))
    assert r.cancel(PartId("b")) == [("P0", AttemptId("b", 0, 1)), ("C0", AttemptId("b", 0, 1))]
    r.add(PartId("c"), prompt(5), 4)
    r.dispatch()
    to_decode(r, AttemptId("c", 0, 1))
    assert (
        r.cancel(PartId("c")) == [("C0", AttemptId("c", 0, 1))]
        and r.finish(AttemptId("c", 0, 1)) is None
    )
    r.check_integrity()


def test_impossible_requests_and_configs_are_refused():
    r = make()
    with pytest.raises(
        ValueError,
        match=r"request 'a': needs KV for 1108 tokens, the largest completion engine holds 1000",
    ):
        r.add(PartId("a"), prompt(8), 1100)
    r.add(PartId("a"), prompt(8), 11)
    with pytest.raises(ValueError, match="'a': this id is already in use"):
        r.add(PartId("a"), prompt(8), 11)
    with pytest.raises(ValueError, match="the name 'C' is taken"):
        Router(["C"], {"C": Capacity(1, 1)})
    with pytest.raises(ValueError, match="max_attempts must be >= 1, got 0"):
        RouterConfig(max_attempts=0)
    with pytest.raises(ValueError, match="max_requests must be >= 1, got 0"):
        Capacity(0, 10)


@pytest.mark.parametrize("name", ["a", "", "a@b@2", "x/1", "r.0@1", "r.0@1/2", "a\nb", "1.2.3"])
def test_ids_are_read_as_they_were_written_whatever_the_name(name):
    attempt = PartId(name, 3).attempt(12)
    assert AttemptId.parse(str(attempt)) == attempt == parse_id(str(attempt))
    assert HandoffId.parse(str(attempt.handoff(4))) == HandoffId(attempt, 4)
    assert attempt.part_id == PartId(name, 3) < attempt.part_id.attempt(1).part_id._replace(part=4)
    with pytest.raises(ValueError, match="names a hand-over"):
        AttemptId.parse(str(attempt.handoff(4)))
    with pytest.raises(ValueError, match="names an attempt"):
        HandoffId.parse(str(attempt))


@pytest.mark.parametrize(
    "text", ["", "a", "a@1", "a.@1", "a.0@", "a.0@-1", "a.0@1/", "a.0@1/x", "a.0@" + "9" * 5000]
)
def test_what_is_no_id_is_refused(text):
    with pytest.raises(ValueError, match="is no id of an attempt or a hand-over"):
        parse_id(text)


@pytest.mark.parametrize("seed", range(4))
def test_random_events_lose_and_double_nothing(seed):
    rng = random.Random(seed)
    r = make(
        p=3,
        c=3,
        capacity=Capacity(5, 400),
        max_held_requests=3,
        max_queued_tokens=200,
        affinity_block=8,
    )
    results: dict[str, str] = {}
    attempts: list[str] = []

    def end(request_id, how):
        assert request_id not in results
        results[request_id] = how

    def settle(verdict):
        if verdict is not None and not verdict.retry:
            end(verdict.part, verdict.reason)

    for i in range(600):
        r.add(PartId(f"r{i}"), prompt(rng.randint(1, 60), rng.randint(0, 3)), rng.randint(1, 30))
        attempts += [a.attempt for a in r.dispatch()]
        for _ in range(6):
            attempt = (
                rng.choice(attempts)
                if rng.random() < 0.3 or not r.jobs
                else rng.choice(list(r.jobs.values())).attempt_id
            )
            match rng.randrange(9):
                case 0 | 1:
                    r.prefill_progress(attempt, rng.randint(1, 20), rng.random())
                case 2 | 3:
                    if r.assign_decode(attempt):
                        to_decode(r, attempt)
                case 4 | 5:
                    if (done := r.finish(attempt)) is not None:
                        end(done, "ok")
                case 6:
                    settle(r.fail(attempt, "failed"))
                case 7:
                    request_id = attempt.part_id
                    if request_id in r.jobs:
                        r.cancel(request_id)
                        end(request_id, "cancelled")
                case 8 if rng.random() < 0.1:
                    name = rng.choice([*r.prompt, *r.completion])
                    for verdict in r.engine_failed(name, "died"):
                        settle(verdict)
                    if rng.random() < 0.8:
                        r.engine_recovered(name)
        if rng.random() < 0.2:
            for name in (*r.prompt, *r.completion):
                r.engine_recovered(name)
        r.check_integrity()
    for request_id in list(r.jobs):
        r.cancel(request_id)
        end(request_id, "cancelled")
    assert len(results) == 600 and {"ok", "failed", "cancelled"} <= set(results.values())
    r.check_integrity()


def test_a_restored_request_without_room_leaves_nothing_behind():
    r = make(p=1, c=1, capacity=Capacity(1, 1000))
    attempt, engine = r.adopt(PartId("a"), prompt(10), 5)
    assert engine == "C0" and attempt
    assert r.adopt(PartId("b"), prompt(10), 5) is None
    r.check_integrity()
    r.add(PartId("b"), prompt(10), 5)  # its id is free: it may be prefilled again
