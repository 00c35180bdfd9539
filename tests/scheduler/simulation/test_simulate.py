"""The simulator against what can be worked out by hand, and what no run may lose."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer_jax.scheduler import EngineType
from deepinfer_jax.scheduler.simulation.simulate import (
    CostTable,
    Simulation,
    TableCosts,
    compare,
    limits_for,
    make_trace,
    parse_deployment,
    results_table,
    simulate,
    synthetic_trace,
)

PREFILL, DECODE = 0.1, 0.01
KV_BYTES = 1000.0


def flat_costs(host: float = 0.0, prefill: float = PREFILL, decode: float = DECODE) -> TableCosts:
    return TableCosts(
        prefill=CostTable([1], [prefill]),
        decode=CostTable([1], [decode]),
        host_seconds=host,
        kv_bytes_per_token=KV_BYTES,
    )


def run(trace, deployment: str, costs=None, **limits):
    values = dict(block_size=16, num_blocks=512, max_num_batched_tokens=1024, max_num_seqs=64)
    return simulate(
        trace,
        parse_deployment(deployment, limits_for(trace, **values | limits)),
        costs or flat_costs(),
    )


def one(input_length: int = 100, output_length: int = 11):
    return make_trace("one", [0.0], [input_length], [output_length])


# ---- worked out by hand


@pytest.mark.parametrize("zos", [0, 1])
def test_a_request_alone_takes_its_prefill_and_its_decode_steps(zos):
    result = run(one(), f"normal:zos={zos}")
    assert result.requests.queue == 0
    assert result.ttft(50) == pytest.approx(PREFILL)
    np.testing.assert_allclose(result.gap_seconds, DECODE)
    assert result.gap_counts.sum() == 10
    assert result.seconds == pytest.approx(PREFILL + 10 * DECODE)
    assert result.requests.tpot[0] == pytest.approx(DECODE)
    assert result.rank_steps == 11
    assert result.engines[0].busy_seconds == pytest.approx(result.seconds)


def test_an_unforeseen_eos_costs_one_surplus_step_under_zos():
    trace = one().asking_for(100)
    without, with_zos = run(trace, "normal:zos=0"), run(trace, "normal:zos=1")
    assert (without.rank_steps, with_zos.rank_steps) == (11, 12)
    assert without.requests.finish_reason == with_zos.requests.finish_reason == ("stop",)
    assert without.requests.output_tokens == with_zos.requests.output_tokens == 11


def test_zos_hides_the_host():
    host = 0.004
    assert run(one(), "normal:zos=0", flat_costs(host)).itl(50) == pytest.approx(DECODE + host)
    assert run(one(), "normal:zos=1", flat_costs(host)).itl(50) == pytest.approx(DECODE)
    assert run(one(), "normal:zos=1", flat_costs(host=0.02)).itl(50) == pytest.approx(0.02)


def test_chunks_of_a_long_prompt_add_up():
    costs = TableCosts(prefill=CostTable([100, 200], [0.1, 0.2]), decode=CostTable([1], [DECODE]))
    result = run(one(1000), "normal:zos=0", costs, max_num_batched_tokens=256)
    assert result.ttft(50) == pytest.approx(1.0)  # 3 x 256 + 232, a second per 1000 tokens
    assert result.engines[0].tokens[:4].tolist() == [256, 256, 256, 232]


def test_costs_see_tokens_rows_and_context():
    seen = []

    class Spy:
        host_seconds = kv_bytes_per_token = 0.0

        def prefill_seconds(self, tokens, mean_context):
            seen.append(("prefill", tokens, mean_context))
            return PREFILL

        def decode_seconds(self, rows, mean_context):
            seen.append(("decode", rows, mean_context))
            return DECODE

    run(make_trace("two", [0, 0], [100, 300], [2, 2]), "normal:zos=0", Spy())
    # token i sees i + 1 keys; a decode row sees its prompt and itself
    keys = (sum(range(1, 101)) + sum(range(1, 301))) / 400
    assert seen == [("prefill", 400, pytest.approx(keys)), ("decode", 2, (101 + 301) / 2)]


def test_a_split_adds_the_transfer_to_the_second_token_only():
    result = run(one(), "pd:1P:1D:latency=0.003,bandwidth=1e6")
    transfer = 0.003 + 100 * KV_BYTES / 1e6
    assert result.ttft(50) == pytest.approx(PREFILL)
    assert result.gap_seconds.max() == pytest.approx(transfer + DECODE)
    assert result.itl(50) == pytest.approx(DECODE)
    assert result.seconds == pytest.approx(PREFILL + transfer + 10 * DECODE)
    assert (result.transfers, result.transfer_seconds) == (1, pytest.approx(transfer))


def test_transfers_of_one_engine_take_turns():
    trace = make_trace("two", [0, 0], [100, 100], [3, 3])
    result = run(trace, "pd:1P:2D:latency=0,bandwidth=1e6")
    assert sorted(result.requests.finished) == pytest.approx(
        [PREFILL + 0.1 + 2 * DECODE, PREFILL + 0.2 + 2 * DECODE]
    )
    assert result.requests.engine == ("COMPLETION_0", "COMPLETION_1")


def test_waiting_times_are_those_of_an_md1_queue():
    trace = synthetic_trace(
        3_000, rate=0.5 / PREFILL, input_mean=64, output_mean=1, input_cv=0, output_cv=0, seed=1
    )
    result = run(
        trace, "normal:zos=0", max_num_batched_tokens=64, block_size=64
    )  # a step holds one prompt, and each is one step
    waits = [0.0]
    for gap in np.diff(trace.timestamps):
        waits.append(max(0.0, waits[-1] + PREFILL - gap))  # Lindley's recursion
    np.testing.assert_allclose(result.requests.queue, waits, atol=1e-9)
    rho = trace.rate * PREFILL
    assert np.mean(waits) == pytest.approx(
        rho * PREFILL / (2 * (1 - rho)), rel=0.15
    )  # Pollaczek-Khinchine, constant service
    assert result.summary()["engines"][0]["utilisation"] == pytest.approx(rho, rel=0.05)


def test_prefill_stalls_decoding_in_normal_and_not_in_a_split():
    trace = synthetic_trace(150, rate=4, input_mean=200, output_mean=60, seed=1)
    normal, split = run(trace, "normal:2:interval=1"), run(trace, "pd:1P:1D:bandwidth=1e12")
    stalled = DECODE + PREFILL
    assert normal.itl(99) >= stalled > 3 * split.itl(99)
    assert split.itl(95) == pytest.approx(
        DECODE
    )  # one token in 60 waits for the transfer and for steps in flight
    assert split.gap_seconds.max() < stalled
    assert split.attainment(tpot=1.5 * DECODE) > normal.attainment(tpot=1.5 * DECODE)


def test_accepted_drafts_halve_the_steps():
    result = run(one(output_length=21), "normal:num_speculative_tokens=1,acceptance=1,zos=0")
    assert result.rank_steps == 11
    assert result.requests.output_tokens == 21
    assert (result.gap_counts[result.gap_seconds == 0].sum(), result.gap_counts.sum()) == (10, 20)
    assert (
        run(one(output_length=21), "normal:num_speculative_tokens=1,acceptance=0,zos=0").rank_steps
        == 21
    )


def test_shared_prefixes_are_prefilled_once():
    costs = TableCosts(prefill=CostTable([0, 1000], [0, 1]), decode=CostTable([1], [DECODE]))
    trace = make_trace(
        "shared",
        [0, 10, 20],
        [96, 96, 96],
        [2, 2, 2],
        prefix_ids=[(7,), (7,), (8,)],
        prefix_block=64,
    )
    result = run(trace, "normal:enable_prefix_caching=1", costs)
    assert result.requests.hit_tokens.tolist() == [0, 64, 0]
    np.testing.assert_allclose(result.requests.ttft, [0.096, 0.032, 0.096])
    assert run(trace, "normal", costs).requests.hit_tokens.sum() == 0
    assert run(trace, "pd:1P:1D:enable_prefix_caching=1", costs).requests.hit_tokens.tolist() == [
        0,
        64,
        0,
    ]


def test_occupancy_and_timeline():
    result = run(make_trace("two", [0, 5], [160, 160], [11, 11]), "normal:zos=0", num_blocks=100)
    engine = result.engines[0]
    assert engine.cache_usage.max() == pytest.approx(
        11 / 100
    )  # 160 tokens of 10 blocks, and one more block to decode
    assert engine.cache_usage[-1] == 0 and engine.running[-1] == 0
    busy = 2 * (PREFILL + 10 * DECODE)
    assert result.seconds == pytest.approx(5 + busy / 2)
    assert engine.mean_over_time(engine.running, result.seconds) == pytest.approx(
        busy / result.seconds
    )


# ---- nothing is lost


def crowded_trace(seed: int):
    return synthetic_trace(
        120, rate=200, input_mean=60, output_mean=40, max_length=300, arrivals="gamma", seed=seed
    )


DEPLOYMENTS = [
    "normal",
    "normal:blocks=64,stop_preempted_request=0",
    "normal:2:dp=3,zos=0,blocks=80",
    "normal:dp=2,num_speculative_tokens=2,acceptance=0.6,seqs=8",
    "normal:priority_scheduling=1,fair_users=1,expected_output_fraction=0.5,blocks=64",
    "pd:1P:2D",
    "pd:2P:1D:d.dp=2,d.seqs=4,p.seqs=6,p.blocks=48",
    "pd:1P:1D:reserve=0,d.blocks=48",
    "pd:1P:3D:p.zos=1,d.zos=0,d.num_speculative_tokens=1,acceptance=0.5,latency=0.2,bandwidth=1e6",
]


@pytest.mark.parametrize("surprise", [False, True], ids=["by length", "by EOS"])
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_every_request_ends_exactly_once(deployment, surprise):
    trace = crowded_trace(seed=len(deployment))
    trace = trace.asking_for(100) if surprise else trace
    result = run(trace, deployment)  # ending twice, never, or with blocks held raises
    r = result.requests
    done = r.completed
    assert (r.output_tokens[done] == trace.output_lengths[done]).all()
    assert set(r.finish_reason) <= {"stop", "length", "insufficient_system_resource"}
    assert result.gap_counts.sum() == np.maximum(r.output_tokens - 1, 0).sum()
    started = ~np.isnan(r.first_token)
    assert (r.first_scheduled[started] >= r.arrival[started]).all() and (
        r.first_token[started] > r.first_scheduled[started]
    ).all()
    assert (r.finished >= np.nan_to_num(r.first_token)).all() and started[done].all()
    s = result.summary()
    assert s["completed"] + sum(s["failed"].values()) == len(trace)


@pytest.mark.parametrize("seed", range(12))
def test_random_deployments_lose_nothing(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    trace = synthetic_trace(
        40,
        rate=pick(20, 300, np.inf),
        input_mean=60,
        output_mean=pick(1, 20),
        max_length=400,
        shared_prefix=40,
        seed=seed,
    )
    options = f"blocks={pick(9, 20, 80)},seqs={pick(1, 3, 20)},tokens={pick(16, 64, 1024)}"
    options += f",num_speculative_tokens={pick(0, 2)},acceptance=0.5"
    options += f",dp={pick(1, 2, 3)},enable_prefix_caching={pick(0, 1)}"
    options += f",interval={pick(1, 20)},zos={pick(0, 1)}"
    for deployment in (
        f"normal:{options},stop_preempted_request={pick(0, 1)}",
        f"pd:{pick(1, 2)}P:{pick(1, 2)}D:{options},reserve={pick(0, 1)},latency={pick(0, 1)}"
        f",max_held_requests={pick(1, 8)}",
    ):
        result = run(trace if pick(0, 1) else trace.asking_for(90), deployment)
        done = result.requests.completed
        assert (result.requests.output_tokens[done] == trace.output_lengths[done]).all()
        assert result.gap_counts.sum() == np.maximum(result.requests.output_tokens - 1, 0).sum()


def test_a_scarce_pool_preempts_and_recomputes():
    result = run(crowded_trace(0), "normal:blocks=64,stop_preempted_request=0")
    assert result.requests.preemptions.sum() > 0 and result.requests.completed.all()
    stopped = run(crowded_trace(0), "normal:blocks=64")
    assert stopped.summary()["failed"] == {
        "insufficient_system_resource": stopped.requests.preemptions.sum()
    }


def test_a_completion_engine_preempts_only_without_full_reservation():
    trace = crowded_trace(0)
    assert run(trace, "pd:1P:1D:d.blocks=48").requests.preemptions.sum() == 0
    result = run(trace, "pd:1P:1D:d.blocks=48,reserve=0")
    assert result.requests.preemptions.sum() == (~result.requests.completed).sum() > 0


def test_a_full_completion_engine_holds_the_prompt_engine_back():
    trace = make_trace("burst", np.zeros(20), [64] * 20, [11] * 20)
    result = run(trace, "pd:1P:1D:d.seqs=1,p.blocks=16,latency=0")
    assert result.requests.completed.all()
    assert result.engines[0].cache_usage.max() == 1.0
    assert result.seconds >= 20 * 10 * DECODE  # one after the other
    assert (np.diff(result.requests.finished) > 0).all()  # in order of arrival


def test_requests_that_can_never_run_are_refused_and_the_others_go_on():
    trace = make_trace("long", [0, 0, 0], [500, 50, 100], [4, 4, 300])
    normal = run(trace, "normal:max_model_len=400")
    assert normal.requests.finish_reason == ("prompt_length_exceeded", "length", "length")
    assert np.isnan(normal.requests.first_token[0])
    split = run(trace, "pd:1P:1D:max_model_len=400,d.blocks=20")
    assert split.requests.finish_reason == (
        "prompt_length_exceeded",
        "length",
        "insufficient_system_resource",
    )


def test_a_stall_is_an_error_with_the_state(monkeypatch):
    monkeypatch.setattr(Simulation, "_place", lambda self, move: False)
    with pytest.raises(RuntimeError, match="stalls at 0.100 s: PROMPT_0 rank 0.* 1 hand-overs"):
        run(one(), "pd:1P:1D")


@pytest.mark.parametrize(
    "deployment", ["normal:2:dp=2,num_speculative_tokens=1,acceptance=0.5", "pd:2P:2D"]
)
def test_the_same_arguments_give_the_same_result(deployment):
    first, second = (run(crowded_trace(5), deployment) for _ in range(2))
    assert json.dumps(first.summary()) == json.dumps(second.summary())
    for name in ("first_scheduled", "first_token", "finished"):
        np.testing.assert_array_equal(getattr(first.requests, name), getattr(second.requests, name))


def test_ranks_and_engines_share_the_load():
    trace = synthetic_trace(200, rate=50, input_mean=50, output_mean=20, seed=2)
    for deployment in ("normal:2:dp=2", "pd:2P:2D"):
        engines = run(trace, deployment).engines
        for role in {e.role for e in engines}:
            steps = [e.num_steps for e in engines if e.role is role]
            assert min(steps) > 0.5 * max(steps)


def test_costs_by_role_and_by_engine():
    costs = {
        EngineType.PROMPT: flat_costs(prefill=0.5),
        EngineType.COMPLETION: flat_costs(decode=0.2),
    }
    result = run(one(), "pd:1P:1D", costs)
    assert result.ttft(50) == pytest.approx(0.5) and result.itl(50) == pytest.approx(0.2)
    with pytest.raises(
        ValueError, match=r"no step costs for NORMAL; the costs cover PROMPT, COMPLETION"
    ):
        run(one(), "normal", costs)


def test_compare_prints_deployments_side_by_side():
    trace = crowded_trace(1)
    deployments = [
        parse_deployment(text, limits_for(trace)) for text in ("normal:2:name=together", "pd:1P:1D")
    ]
    text = results_table(compare(trace, deployments, flat_costs()))
    assert "together  pd:1P:1D" in text.splitlines()[0]
    for label in (
        "requests/s",
        "TTFT p99 ms",
        "ITL p50 ms",
        "preemptions",
        "COMPLETION_0",
        "NORMAL_1",
    ):
        assert label in text
