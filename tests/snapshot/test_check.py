"""Records edited by somebody who can mend their checksum: refused before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
from engine_cases import GOLDEN
from snapshot_cases import empty_record

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.snapshot import files, restore
from deepinfer_jax.snapshot.check import check
from deepinfer_jax.snapshot.files import Snapshot, SnapshotError
from deepinfer_jax.snapshot.records import Place, RequestRecord, SnapshotRecord

VOCAB = 512
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def make() -> LLMEngine:
    args = EngineArgs(
        str(GOLDEN / "llama"),
        max_model_len=96,
        max_num_seqs=4,
        num_blocks=64,
        max_num_batched_tokens=96,
        prefill_buckets=(96,),
        decode_buckets=(4,),
        warm_up=False,
        disable_log_stats=True,
        enable_prefix_caching=True,
    )
    return LLMEngine(args)


@pytest.fixture(scope="module")
def engine():
    engine = make()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def snapshot(engine, tmp_path_factory) -> Snapshot:
    """Three requests that decode, one of two completions, and pages of the prefix cache."""
    folder = tmp_path_factory.mktemp("snapshot")
    for i in range(3):
        engine.add_request(f"r{i}", list(range(5, 40 + i)), PARAMS.replace(n=1 + (i == 1)))
    for _ in range(4):
        engine.step()
    job = engine.snapshot(folder)
    while engine.has_unfinished_requests():
        engine.step()
    job.wait()
    assert engine.model_config.vocab_size == VOCAB
    return files.load(folder)


def place(r: SnapshotRecord) -> Place:
    return r.requests[0].completions[0].place


def first(r: SnapshotRecord) -> RequestRecord:
    return r.requests[0]


def state(r: SnapshotRecord):
    return first(r).completions[0].state


def cycle(r: SnapshotRecord) -> None:
    child = next(p for p in r.prefix if isinstance(p.parent, int))
    next(p for p in r.prefix if p.node == child.parent).parent = child.node


EDITS: dict[str, Callable[[SnapshotRecord], object]] = {
    "num_cached huge": lambda r: setattr(place(r), "num_cached", 10**5),
    "num_cached negative": lambda r: setattr(place(r), "num_cached", -5),
    "num_cached one less": lambda r: setattr(place(r), "num_cached", place(r).num_cached - 1),
    "rows huge": lambda r: setattr(place(r), "rows", [10**6] * len(place(r).rows)),
    "rows negative": lambda r: setattr(place(r), "rows", [-3] * len(place(r).rows)),
    "rows many": lambda r: setattr(place(r), "rows", [0] * 60),
    "rows few": lambda r: place(r).rows.pop(),
    "rank": lambda r: setattr(place(r), "rank", 7),
    "rank negative": lambda r: setattr(place(r), "rank", -1),
    "state row": lambda r: setattr(place(r), "state_row", 0),
    "max_len": lambda r: setattr(place(r), "max_len", 3),
    "max_len huge": lambda r: setattr(place(r), "max_len", 2**40),
    "decodes without output": lambda r: setattr(state(r), "output_token_ids", []),
    "output ids": lambda r: setattr(state(r), "output_token_ids", [10**6] * 4),
    "output ids negative": lambda r: setattr(state(r), "output_token_ids", [-7] * 4),
    "prompt ids": lambda r: setattr(state(r), "prompt_token_ids", [2**30] * 35),
    "no prompt": lambda r: setattr(state(r), "prompt_token_ids", []),
    "consumed": lambda r: setattr(state(r), "consumed", -(10**6)),
    "reported": lambda r: setattr(state(r), "reported", 10**6),
    "hit_tokens": lambda r: setattr(state(r), "hit_tokens", 10**6),
    "seed": lambda r: setattr(state(r), "seed", 2**64),
    "logprobs": lambda r: setattr(state(r), "logprobs", [[]] * 99),
    "n": lambda r: first(r).params.update(n=-1),
    "min_p": lambda r: state(r).params.update(min_p=7),
    "unknown parameter": lambda r: state(r).params.update(zap=1),
    "no completions": lambda r: first(r).completions.clear(),
    "completion twice": lambda r: setattr(r.requests[1].completions[1], "index", 0),
    "completion index": lambda r: setattr(r.requests[1].completions[1], "index", 5),
    "other prompt": lambda r: setattr(
        r.requests[1].completions[1].state, "prompt_token_ids", [3] * 36
    ),
    "request twice": lambda r: setattr(r.requests[1], "request_id", "r0"),
    "ended with a place": lambda r: setattr(first(r).completions[0], "finish_reason", "stop"),
    "page row": lambda r: setattr(r.prefix[0], "row", 10**6),
    "page rank": lambda r: setattr(r.prefix[0], "rank", -1),
    "page content": lambda r: setattr(r.prefix[0], "content", "zz" * 64),
    "page twice": lambda r: setattr(r.prefix[1], "node", r.prefix[0].node),
    "pages in a circle": cycle,
    "seeds": lambda r: r.seeds.update(bit_generator="nope"),
    "seeds empty": lambda r: r.seeds.clear(),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_record_is_refused(snapshot, name):
    record = copy.deepcopy(snapshot.record)
    EDITS[name](record)
    with pytest.raises(SnapshotError):
        check(Snapshot(record, snapshot.arrays), VOCAB)


def test_what_an_engine_wrote_passes_and_a_refusal_changes_nothing(engine, snapshot):
    check(snapshot, VOCAB)
    before = [s.blocks.num_free for s in engine.schedulers]
    record = copy.deepcopy(snapshot.record)
    record.requests[-1].completions[0].place.rows[-1] = 10**6
    with pytest.raises(SnapshotError, match=r"'r2': block row must lie in \[0, \d+\], got 1000000"):
        engine.boundary.run(lambda: restore.put(engine, Snapshot(record, snapshot.arrays)))
    assert [s.blocks.num_free for s in engine.schedulers] == before and not engine.live.requests
    engine.check_integrity()


@pytest.mark.parametrize("busy", [False, True])
def test_seeds_go_on_where_they_were_unless_requests_here_have_drawn_from_them(
    engine, snapshot, busy
):
    record = copy.deepcopy(snapshot.record)
    record.requests, record.prefix = [], []
    record.seeds = SeedSource(5).state
    if busy:
        engine.add_request("mine", [5, 6, 7], PARAMS)
    before = engine.seeds.state
    engine.boundary.run(lambda: restore.put(engine, Snapshot(record, {})))
    assert engine.seeds.state == (before if busy else SeedSource(5).state) != SeedSource(6).state
    engine.abort_request(["mine"])
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("change", ["content", "shape", "dtype"])
def test_an_array_that_is_not_what_was_written_is_named(tmp_path, monkeypatch, change):
    """As if another file had been put into its place, with checksums of its own."""
    array = np.arange(12, dtype=np.float32).reshape(2, 6)
    other = {
        "content": array + 1,
        "shape": array.reshape(3, 4),
        "dtype": array.view(np.int32),
    }[change]
    described = files.ArrayRecord.of(array)
    with monkeypatch.context() as patch:
        patch.setattr(files.ArrayRecord, "of", classmethod(lambda cls, _: described))
        files.write(Snapshot(empty_record(), {"blocks": {"k": other}}), tmp_path)
    with pytest.raises(SnapshotError, match=r"snapshot 1 is damaged: .*blocks/k is .*, it was "):
        files.load(tmp_path)
