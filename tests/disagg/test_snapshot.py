"""Snapshots of prompt and completion engines together, into one engine, into another such pair, and
the other way round."""

from __future__ import annotations

import random

import pytest
from snapshot_cases import GOLDEN, TINY, Collector, assert_same, random_requests, run, tiny_engine

from deepinfer_jax.disagg.config import DisaggregationConfig
from deepinfer_jax.disagg.deployment import DisaggregatedEngine
from deepinfer_jax.snapshot.job import take
from deepinfer_jax.snapshot.restore import restore

FIELDS = {
    k: v for k, v in TINY.items() if k not in ("zero_overhead_scheduling", "stop_preempted_request")
} | {"num_blocks": 60}


def deployment(spec: str, **meshes) -> DisaggregatedEngine:
    return DisaggregatedEngine(
        {"model": str(GOLDEN / "llama"), **FIELDS}, DisaggregationConfig.parse(spec, **meshes)
    )


@pytest.fixture(scope="module")
def normal():
    return tiny_engine(num_blocks=60)


@pytest.fixture(scope="module")
def pairs():
    roomy = {
        "num_blocks": 160,
        "max_num_seqs": 12,
        "decode_buckets": (12,),
    }  # takes all that the other one may have begun
    made = [
        deployment("1P:1D", completion_mesh=roomy),
        deployment("1P:2D", completion_mesh={"data_parallel_size": 2, "num_blocks": 40}),
    ]
    yield made
    for engine in made:
        engine.close()


def finish(engine, collector, kinds, outputs=None):
    """Collects until everything has ended, or `outputs` outputs have come."""
    count = 0
    while engine.has_unfinished_requests() and (outputs is None or count < outputs):
        got = engine.step()
        count += len(got)
        collector.take(got, kinds)
    if outputs is None and isinstance(engine, DisaggregatedEngine):
        engine.wait_idle()
    if outputs is None:
        engine.check_integrity()


@pytest.mark.parametrize("number", range(6))
def test_a_pair_goes_on_elsewhere(number, pairs, normal, tmp_path):
    source, target = pairs[number % 2], (normal, pairs[1 - number % 2])[number // 2 % 2]
    rng = random.Random(number)
    requests = random_requests(rng, 5)
    kinds = {request_id: params.output_kind for request_id, _, params in requests}
    for request in requests:
        source.add_request(*request)
    before = Collector()
    finish(source, before, kinds, outputs=rng.randrange(12))
    source.snapshot(tmp_path).wait(60)
    after = before.copy()
    finish(source, after, kinds)
    if target is normal:
        restore(normal, tmp_path)
    else:
        target.restore(tmp_path)
    finish(target, before, kinds)
    assert_same(before, after)


def test_one_engine_goes_on_as_a_pair(pairs, normal, tmp_path):
    for number in range(4):
        rng = random.Random(100 + number)
        requests = [(i, p, s.replace(logprobs=None)) for i, p, s in random_requests(rng, 4)]
        kinds = {request_id: params.output_kind for request_id, _, params in requests}
        for request in requests:
            normal.add_request(*request)
        before = Collector()
        run(normal, before, kinds, rng.randrange(1, 16))
        take(normal, tmp_path / str(number)).wait(60)
        after = before.copy()
        run(normal, after, kinds)
        pairs[number % 2].restore(tmp_path / str(number))
        finish(pairs[number % 2], before, kinds)
        assert_same(before, after)
    engines = [e for p in pairs for e in (*p.prompt_engines, *p.completion_engines)]
    assert not [seq for e in engines for s in e.schedulers for seq in s.sequences]
