"""Router: balance, affinity, back-pressure, retries; exactly one result per request
whatever fails."""

from __future__ import annotations

import random

import pytest

from deepinfer_jax.scheduler.routing.router import Capacity, Router, RouterConfig, split_attempt

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
        r.add(f"r{i}", prompt(length, i), 8)
    assert [a.prompt_engine for a in r.dispatch()] == ["P0", "P1", "P1", "P1"]
    r.prefill_progress("r0@1", 850)
    r.add("r4", prompt(100), 8)
    assert r.dispatch()[0].prompt_engine == "P0"
    r.check_integrity()


def test_cost_is_learned_per_context_length():
    r = make(length_buckets=(100,), seconds_per_token=0.001, cost_smoothing=1.0)
    r.add("long", prompt(200), 1)
    r.add("short", prompt(100), 1)
    r.dispatch()
    assert r.queue_seconds("P0") == pytest.approx(0.2)
    r.prefill_progress(
        "long@1", 100, seconds=1.0
    )  # ten times slower than thought, for long contexts only
    assert r.queue_seconds("P0") == pytest.approx(1.0) and r.queue_seconds("P1") == pytest.approx(
        0.1
    )


def test_prefix_affinity_beats_an_equal_queue_and_yields_to_a_long_one():
    r = make(affinity_block=16)
    shared = prompt(160)
    r.add("a", shared, 1)
    r.dispatch()
    r.add("other", prompt(160, 50), 1)
    assert r.dispatch()[0].prompt_engine == "P1"
    for attempt in ("a@1", "other@1"):
        r.prefilled(attempt)
    r.add("b", [*shared, 1, 2, 3], 1)
    assert r.dispatch()[0].prompt_engine == "P0"
    r.add("c", [*shared, 4], 1)
    r.add("busy", prompt(160, 70), 1)
    r.dispatch()
    assert r.prompt["P0"].queued_tokens < 163


def test_decode_balances_both_dimensions():
    r = Router(
        ["P0"],
        {"many": Capacity(100, 1000), "few": Capacity(2, 100_000)},
        RouterConfig(affinity_block=0),
    )
    for i, length in enumerate([500, 500, 500, 10, 10]):
        r.add(f"r{i}", prompt(length), 100)
    r.dispatch()
    assert [r.assign_decode(f"r{i}@1") for i in range(5)] == ["few", "many", "few", "many", "many"]
    assert r.assign_decode("r0@1") == "few", "placing twice changes nothing"
    r.check_integrity()


def test_back_pressure_stops_prefilling_until_kv_leaves():
    r = make(p=1, c=1, capacity=Capacity(1, 1000), max_held_requests=2)
    for i in range(4):
        r.add(f"r{i}", prompt(10), 8)
        for a in r.dispatch():
            r.prefilled(a.attempt_id)
    assert r.assign_decode("r0@1") == "C0" and r.assign_decode("r1@1") is None
    assert len(r.queue) == 2 and not r.dispatch()
    r.delivered("r0@1")
    assert [a.request_id for a in r.dispatch()] == ["r2"]
    assert r.assign_decode("r1@1") is None
    assert r.finish("r0@1") == "r0" and r.assign_decode("r1@1") == "C0"
    r.check_integrity()


def test_refusal_by_one_completion_engine_goes_to_another():
    r = make()
    r.add("a", prompt(10), 8)
    r.dispatch()
    first = r.assign_decode("a@1")
    r.release_decode("a@1")
    assert r.assign_decode("a@1", exclude=[first]) not in (first, None)
    r.check_integrity()


def test_retry_gets_a_new_id_and_the_old_one_finds_nothing():
    r = make()
    r.add("a", prompt(10), 8)
    (first,) = r.dispatch()
    r.assign_decode(first.attempt_id)
    (verdict,) = r.engine_failed(first.prompt_engine, "killed")
    assert verdict.retry and verdict.engines_to_notify == ("C0",) and verdict.reason == "killed"
    assert r.finish(first.attempt_id) is None and r.fail(first.attempt_id, "late") is None
    (second,) = r.dispatch()
    assert second.attempt_id == "a@2" and second.prompt_engine != first.prompt_engine
    assert r.finish(first.attempt_id) is None and r.assign_decode(first.attempt_id) is None
    r.prefilled(first.attempt_id)
    assert to_decode(r, "a@2") and r.finish("a@2") == "a" and r.finish("a@2") is None
    r.check_integrity()


def test_gives_up_after_max_attempts_or_when_nobody_is_left():
    r = make(max_attempts=2)
    r.add("a", prompt(10), 8)
    assert r.fail(r.dispatch()[0].attempt_id, "x").retry
    assert not r.fail(r.dispatch()[0].attempt_id, "y").retry and not r.jobs
    r.add("b", prompt(10), 8)
    r.dispatch()
    for name in ("P0", "P1"):
        verdicts = r.engine_failed(name, "gone")
    assert not any(v.retry for v in verdicts)
    r.engine_recovered("P0")
    r.add("c", prompt(10), 8)
    assert r.dispatch()[0].prompt_engine == "P0"


def test_tokens_given_to_the_caller_forbid_a_retry():
    r = make()
    r.add("a", prompt(10), 8)
    attempt = r.dispatch()[0].attempt_id
    to_decode(r, attempt)
    r.no_retry(attempt)
    assert not r.engine_failed("C0", "killed")[0].retry
    r.check_integrity()


def test_cancel_reaches_both_sides_at_every_stage():
    r = make()
    assert r.cancel("nobody") == []
    r.add("queued", prompt(5), 4)
    assert r.cancel("queued") == [] and not r.queue
    r.add("a", prompt(5), 4)
    r.dispatch()
    assert r.cancel("a") == [("P0", "a@1")]
    r.add("b", prompt(5), 4)
    r.dispatch()
    r.assign_decode("b@1")
    assert r.cancel("b") == [("P0", "b@1"), ("C0", "b@1")]
    r.add("c", prompt(5), 4)
    r.dispatch()
    to_decode(r, "c@1")
    assert r.cancel("c") == [("C0", "c@1")] and r.finish("c@1") is None
    r.check_integrity()


def test_impossible_requests_and_configs_are_refused():
    r = make()
    with pytest.raises(
        ValueError,
        match=r"request 'a': needs KV for 1108 tokens, the largest completion engine holds 1000",
    ):
        r.add("a", prompt(8), 1100)
    r.add("a", prompt(8), 11)
    with pytest.raises(ValueError, match="'a': this id is already in use"):
        r.add("a", prompt(8), 11)
    with pytest.raises(ValueError, match="at least one engine of each role"):
        Router([], {"C": Capacity(1, 1)})
    with pytest.raises(ValueError, match="different names"):
        Router(["C"], {"C": Capacity(1, 1)})
    with pytest.raises(ValueError, match="max_attempts must be >= 1, got 0"):
        RouterConfig(max_attempts=0)
    assert split_attempt("a@b@2") == ("a@b", 2)


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
            end(verdict.request_id, verdict.reason)

    for i in range(600):
        r.add(f"r{i}", prompt(rng.randint(1, 60), rng.randint(0, 3)), rng.randint(1, 30))
        attempts += [a.attempt_id for a in r.dispatch()]
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
                    request_id = split_attempt(attempt)[0]
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
    attempt, engine = r.resume("a", prompt(10), 5)
    assert engine == "C0" and attempt
    assert r.resume("b", prompt(10), 5) is None
    r.check_integrity()
    r.add("b", prompt(10), 5)  # its id is free: it may be prefilled again
