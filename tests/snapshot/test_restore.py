"""Snapshot at a random step, restore elsewhere, same tokens.

The killed process is realised in two ways: most trials drop what the source engine holds and go on
in another engine of this process (an engine takes seconds to build); tests in
test_snapshot_process.py kill a real process with SIGKILL.
"""

from __future__ import annotations

import random

import jax
import pytest
from snapshot_cases import Collector, assert_same, random_requests, run, tiny_engine

from deepinfer_jax import SamplingParams
from deepinfer_jax.snapshot import job as snapshot
from deepinfer_jax.snapshot import restore as snapshot_resume
from deepinfer_jax.snapshot.job import take
from deepinfer_jax.snapshot.restore import restore

TRIALS = (20, 60, 60, 60)
"""Per target: 200 in all. Steps over eight devices on two cores take several times as long as
others."""
ON_DISK = 8  # every so many trials go through files


@pytest.fixture(scope="module")
def sources():
    return [tiny_engine(), tiny_engine(zero_overhead_scheduling=True, num_decode_steps=2)]


@pytest.fixture(scope="module")
def targets():
    devices = jax.devices()
    return [
        tiny_engine(data_parallel_size=8, num_blocks=14),
        tiny_engine(
            data_parallel_size=2, devices=devices[2:4], num_blocks=40, zero_overhead_scheduling=True
        ),
        tiny_engine(num_blocks=16, devices=devices[5:6]),  # smaller: some of it is computed again
        tiny_engine(
            tensor_parallel_size=2, devices=devices[6:8], enable_prefix_caching=False, num_blocks=60
        ),
    ]


@pytest.fixture(scope="module")
def wide():
    return tiny_engine(data_parallel_size=8, num_blocks=14)


def start(engine, rng, count):
    requests = random_requests(rng, count)
    for request_id, prompt, params in requests:
        engine.add_request(request_id, prompt, params)
    return {request_id: params.output_kind for request_id, _, params in requests}


def drop_everything(engine):
    engine.abort_request(list(engine.live.requests))
    while engine.has_unfinished_requests():
        engine.step()
    engine.check_integrity()
    for s in engine.schedulers:
        s.blocks.drop_cache()


def trial(number, source, target, folder=None):
    rng = random.Random(number)
    kinds = start(source, rng, rng.randrange(2, 7))
    before = Collector()
    run(source, before, kinds, rng.randrange(0, 30))
    if folder is None:
        captured = source.boundary.run(lambda: snapshot.capture(source))
    else:
        job = take(source, folder)
    after = before.copy()
    if folder is None:
        for _ in range(
            rng.randrange(4)
        ):  # blocks are copied while they are overwritten, freed and found again
            run(source, after, kinds, rng.randrange(1, 6))
            source.boundary.run(captured.copies[0].copy_slice)
        run(source, after, kinds, rng.choice((0, 3, None)))
        loaded = captured.to_host()
    run(source, after, kinds)  # serving goes on; nothing of it is in the snapshot
    if folder is None:
        target.boundary.run(lambda: snapshot_resume.put(target, loaded))
    else:
        job.wait(60)
        restore(target, folder)
    target.check_integrity()
    run(target, before, kinds)
    assert_same(before, after)
    for engine in (source, target):
        drop_everything(engine)


@pytest.mark.parametrize(
    ("target", "first"), [(t, i) for t, count in enumerate(TRIALS) for i in range(0, count, 20)]
)
def test_random_trials(target, first, sources, targets, tmp_path):
    for i in range(first, first + 20):
        folder = tmp_path / "snapshots" if i % ON_DISK == 0 else None
        trial(100 * target + i, sources[i % len(sources)], targets[target], folder)


def test_eight_devices_to_two(wide, targets, tmp_path):
    for number in range(1000, 1008):
        trial(number, wide, targets[1], tmp_path if number % 4 == 0 else None)


def test_no_hold_copies_more_than_a_few_blocks(sources, targets, monkeypatch):
    """The pause that running requests see, counted instead of timed: at the moment itself one block
    per sequence, then at most a slice between two steps, however much KV there is."""
    source, target, log = sources[1], targets[3], []
    mover = source.ensure_mover()
    gather = mover.gather
    monkeypatch.setattr(
        mover,
        "gather",
        lambda ids, kind="blocks": (log.append(sum(map(len, ids))), gather(ids, kind))[1],
    )
    requests = [
        (f"h{i}", [3 + (7 * i + 5 * k) % 490 for k in range(50 + i)], SamplingParams(max_tokens=20))
        for i in range(4)
    ]
    kinds = {request_id: params.output_kind for request_id, _, params in requests}
    for request in requests:
        source.add_request(*request)
    before = Collector()
    while source.schedulers[0].num_running < 3:
        run(source, before, kinds, 1)
    captured = source.boundary.run(lambda: snapshot.capture(source))
    (copy,) = captured.copies
    copy.share = 0.0  # the smallest slices
    assert sum(log) <= 4 and len(copy.rows["blocks"]) > 20
    after, more, slices = before.copy(), True, 0
    while more:
        run(source, after, kinds, 1)
        log.clear()
        more = source.boundary.run(copy.copy_slice)
        assert sum(log) <= mover.buckets[0]
        slices += 1
    assert slices >= 3
    loaded = captured.to_host()
    run(source, after, kinds)
    target.boundary.run(lambda: snapshot_resume.put(target, loaded))
    run(target, before, kinds)
    assert_same(before, after)
