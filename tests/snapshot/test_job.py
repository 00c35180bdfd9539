"""Snapshots of a job of several processes: parts and their manifest, and two real processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from deployment import Deployment, free_port
from snapshot_cases import (
    PROMPTS,
    SAMPLED,
    complete,
    empty_record,
    request_record,
    tiny_engine,
)

from deepinfer_jax import LLM
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.snapshot.files import PARTS, Share, Snapshot, SnapshotError, load, write_share
from deepinfer_jax.snapshot.records import PageRecord, Place, share_of
from deepinfer_jax.snapshot.restore import restore

HELPERS = Path(__file__).parent.parent / "helpers"


# ---- files ---------------------------------------------------------------------------------------


def part(process: int, value: float) -> Snapshot:
    request = request_record(str(process), Place(rows=[0, 1]), arrival=float(-process))
    record = empty_record(requests=[request], prefix=[PageRecord(0, 1, "", "", 7)])
    return Snapshot(record, {"blocks": {"k": np.full((2 + process, 1, 3), value, np.float32)}})


def write_all(folder, key, values, timeout=60.0):
    """All processes' parts; their results or exceptions."""
    results = [None] * len(values)

    def one(i):
        try:
            results[i] = write_share(
                part(i, values[i]), folder, Share(key, i, len(values)), timeout
            )
        except TimeoutError as error:
            results[i] = error

    threads = [
        threading.Thread(target=one, args=(i,)) for i, v in enumerate(values) if v is not None
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return results


def test_parts_become_one_snapshot_or_none(tmp_path):
    assert write_all(tmp_path, 11, [1.0, 2.0]) == [1, 1]
    whole = load(tmp_path)
    assert whole.record.ranks == 4
    assert [r.request_id for r in whole.record.requests] == ["1", "0"]  # by arrival
    assert [p.rows for p in whole.record.places] == [[2, 3], [0, 1]]
    assert whole.record.prefix == [PageRecord(0, 1, "", "", 7), PageRecord(2, 3, "", "", 7)]
    np.testing.assert_array_equal(whole.arrays["blocks"]["k"][:, 0, 0], [1, 1, 2, 2, 2])
    waiting, _ = write_all(
        tmp_path, 12, [3.0, None], timeout=0.3
    )  # process 1 dies before its part is there
    assert isinstance(waiting, TimeoutError) and "process 1 has not written its part" in str(
        waiting
    )
    _, waiting = write_all(tmp_path, 13, [None, 3.0], timeout=0.3)  # process 0 dies
    assert isinstance(waiting, TimeoutError) and "process 0 has not completed" in str(waiting)
    assert load(tmp_path).arrays["blocks"]["k"][0, 0, 0] == 1.0
    assert write_all(tmp_path, 14, [4.0, 5.0]) == [2, 2] and write_all(
        tmp_path, 15, [6.0, 7.0]
    ) == [3, 3]
    assert {p.name for p in (tmp_path / PARTS).iterdir()} == {
        "12",
        "13",
        "14",
        "15",
    }  # two are kept, two may be going on
    for name in ("12", "13"):
        os.utime(tmp_path / PARTS / name, (0, 0))
    assert write_all(tmp_path, 16, [8.0, 9.0]) == [4, 4]
    assert {p.name for p in (tmp_path / PARTS).iterdir()} == {"15", "16"}


def test_a_process_reads_the_parts_it_needs_and_names_a_damaged_one(tmp_path):
    write_all(tmp_path, 11, [1.0, 2.0])
    damaged = tmp_path / PARTS / "11" / "1.safetensors"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    mine = partial(share_of, ranks=2, owners=[0, 0, 1, 1], process=0)
    loaded = load(tmp_path, select=mine)
    assert [r.request_id for r in loaded.record.requests] == ["0"]
    assert loaded.arrays["blocks"]["k"][1, 0, 0] == 1.0
    with pytest.raises(
        SnapshotError, match=f"{damaged} is damaged: .*'blocks/k' differs from its checksum"
    ):
        load(tmp_path)
    damaged.unlink()
    with pytest.raises(SnapshotError, match=f"{damaged} is damaged: FileNotFoundError"):
        load(tmp_path, select=mine)


def test_everything_goes_to_exactly_one_process():
    for ranks, owners in (
        (1, [0, 1]),
        (4, [0, 0, 1, 1]),
        (5, [0, 1, 2, 3]),
        (8, [0, 1]),
        (2, [0, 0, 1, 1]),
    ):
        requests = [
            request_record(str(i), None if i == 5 else Place(rank=i % ranks)) for i in range(12)
        ]
        outputs = [RequestOutput(i, None, []) for i in ("3", "5", "ended")]
        prefix = [PageRecord(r, r, "", "", 1) for r in range(ranks)]
        whole = empty_record(requests=requests, outputs=outputs, prefix=prefix, ranks=ranks)
        shares = [
            share_of(copy.deepcopy(whole), owners.count(p), owners, p)
            for p in range(len(set(owners)))
        ]
        ids = sorted((r.request_id for s in shares for r in s.requests), key=int)
        assert ids == [str(i) for i in range(12)]
        assert sorted(o.request_id for s in shares for o in s.outputs) == ["3", "5", "ended"]
        assert sorted(p.row for s in shares for p in s.prefix) == list(range(ranks))
        for process, s in enumerate(shares):
            assert all(place.rank < owners.count(process) for place in s.places)
            # sources stay apart: their nodes have the same numbers
            assert len({p.rank for p in s.prefix}) == len(s.prefix)


# ---- processes -----------------------------------------------------------------------------------


def start(folder: Path, what: str, ranks: int) -> list[subprocess.Popen]:
    port, env = (
        str(free_port()),
        {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    command = [sys.executable, str(HELPERS / "snapshot_job.py"), port]
    return [
        subprocess.Popen(
            [*command, str(i), "llama", str(ranks), str(folder), what],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]


def answers(processes: list[subprocess.Popen]) -> list[object]:
    """What each prints; gloo prints as well."""
    lines = [next((x for x in p.stdout if x.startswith("answer ")), None) for p in processes]
    assert None not in lines, f"exit codes {[p.poll() for p in processes]}"
    return [json.loads(x.removeprefix("answer ")) for x in lines]


def kill(processes: list[subprocess.Popen]) -> None:
    for p in processes:
        p.kill()
    for p in processes:
        p.wait(30)


def test_two_processes_go_on_as_one_and_as_two_others(tmp_path):
    one = tiny_engine(num_blocks=60, data_parallel_size=2)
    expected = complete(one, {str(i): p for i, p in enumerate(PROMPTS)})
    processes = start(tmp_path, "snapshot", 4)
    try:
        assert answers(processes) == [1, 1]
    finally:
        kill(processes)
    saved = restore(one, tmp_path)
    assert set(saved) == set(expected)
    assert complete(one) == expected
    processes = start(tmp_path, "restore", 2)  # one rank each instead of two
    try:
        found = answers(processes)
    finally:
        kill(processes)
    assert all(found) and not found[0].keys() & found[1].keys()
    assert found[0] | found[1] == expected


def test_sigterm_of_an_engine_behind_a_router(tmp_path):
    sizes = {
        "num_blocks": 40,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "prefill_buckets": (256,),
        "block_size": 16,
    }
    with Deployment(tmp_path) as d:
        process = d.engine("normal", "N", snapshot_on_sigterm=tmp_path / "saved", block_size=16)
        d.joined("N")
        params = SAMPLED.replace(max_tokens=200)
        with LLM(router=d.address) as llm:
            stream = llm.stream(prompt_token_ids=PROMPTS[:1], sampling_params=params)
            next(stream)
            process.signal(15)
            assert process.wait(60) == -15
    one = tiny_engine(**sizes)
    restore(one, tmp_path / "saved")
    rest = []
    while one.has_unfinished_requests():
        rest += [
            token for o in one.step() for token in o.outputs[0].token_ids
        ]  # it was streaming: what had not been sent
    expected = complete(one, {"again": PROMPTS[0]}, params)["again"]
    assert 0 < len(rest) < 200 and rest == expected[-len(rest) :]
