"""Engines that share a KV store: the same tokens whatever is found there, less to compute, nothing
wrong ever decoded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from snapshot_cases import GOLDEN, TINY, tiny_engine

from deepinfer_jax import LLM, EngineType, SamplingParams
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.stats.prometheus import EngineCollector
from deepinfer_jax.kv.store import entries
from deepinfer_jax.kv.store_format import verify_file
from deepinfer_jax.snapshot.job import take
from deepinfer_jax.snapshot.restore import restore

PROMPT = [3 + 7 * i % 490 for i in range(60)]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def generate(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY, **options
) -> list[tuple[list[int], int]]:
    """(token ids, prompt tokens that were not computed) per prompt; checks that nothing leaked."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"g{i}", prompt, params, **options)
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
    engine.check_integrity()
    assert all(s.cache_usage == 0 for s in engine.schedulers)
    if engine.prefix_store is not None:
        engine.prefix_store.wait_saved()
        assert engine.prefix_store.loading == 0
    return [
        (done[f"g{i}"].outputs[0].token_ids, done[f"g{i}"].num_cached_tokens)
        for i in range(len(prompts))
    ]


def forget(engine: LLMEngine) -> None:
    """Empties the device's own prefix cache, so that everything must come from the tiers below."""
    for s in engine.schedulers:
        s.blocks.drop_cache()


@pytest.fixture(scope="module")
def plain():
    return tiny_engine(enable_prefix_caching=False, num_blocks=40)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def engine_with(folder, **changes):
    return tiny_engine(kv_store=str(folder), **({"num_blocks": 40} | changes))


def test_another_engine_finds_what_one_has_computed(plain, folder):
    expected = generate(plain, [PROMPT])[0][0]
    first = engine_with(folder)
    assert generate(first, [PROMPT]) == [(expected, 0)]
    first.close()
    pages = (len(PROMPT) + len(expected) - 1) // 8
    assert len(list(entries(folder))) == pages
    second = engine_with(folder, data_parallel_size=2)
    turn = PROMPT + expected + [5, 6, 7]
    other = PROMPT[:33] + [9] * 9
    results = generate(second, [turn, other])
    assert [t for t, _ in results] == [t for t, _ in generate(plain, [turn, other])]
    assert [cached for _, cached in results] == [8 * pages, 32]
    stats = second.stats()["kv_store"]
    assert (stats["disk_hits"], stats.get("disk_corrupt", 0)) == (pages + 4, 0)
    second.close()


def test_whatever_is_wrong_with_a_file_the_tokens_are_the_same(plain, folder):
    expected = generate(plain, [PROMPT])[0][0]
    engine = engine_with(folder)
    generate(engine, [PROMPT])
    files = sorted(
        (e.path for e in entries(folder)), key=lambda path: path.stat().st_size
    )  # in the order of their pages
    good = {f: f.read_bytes() for f in files}
    for n, damage in enumerate(
        (
            lambda b: b[:-1],
            lambda b: b"",
            lambda b: b[:200] + b"\xff" + b[201:],
            lambda b: b[:-9] + b"abcdefghi",
        )
    ):
        forget(engine)
        engine.prefix_store.store.disk._bad.clear()
        for file in files:
            file.write_bytes(good[file])
        files[n].write_bytes(damage(good[files[n]]))
        assert generate(engine, [PROMPT])[0][0] == expected
        # and it has been replaced (by what another chunking computes, so not bit by bit the same)
        for file in files:
            with open(file, "rb") as f:
                verify_file(f, str(file))
    swapped = dict(zip(files, [*files[1:], files[0]], strict=True))
    for file, other in swapped.items():
        file.write_bytes(good[other])  # whole pages under wrong names
    forget(engine)
    engine.prefix_store.store.disk._bad.clear()
    assert generate(engine, [PROMPT]) == [(expected, 0)]
    assert engine.stats()["kv_store"]["disk_foreign"] >= 1
    engine.close()


def test_another_model_or_layout_finds_nothing(folder):
    engine = engine_with(folder)
    prompt = [t % 256 for t in PROMPT]
    generate(engine, [prompt])
    engine.close()
    for changes in ({"block_size": 4, "num_blocks": 80}, {"kv_cache_dtype": "bfloat16"}):
        other = engine_with(folder, **changes)
        assert generate(other, [prompt])[0][1] == 0
        other.close()
    other = tiny_engine("llama_rope3", kv_store=str(folder), num_blocks=40)
    assert generate(other, [prompt])[0][1] == 0
    other.close()


def test_host_memory_alone_and_salts_and_users_apart(plain, folder):
    engine = tiny_engine(kv_host_bytes=1 << 24, num_blocks=40, kv_store_namespace="user")
    alice, bob = (GREEDY.replace(user_id=u) for u in ("alice", "bob"))
    expected = generate(plain, [PROMPT])[0][0]
    assert generate(engine, [PROMPT], alice) == [(expected, 0)]
    forget(engine)
    assert generate(engine, [PROMPT], bob) == [(expected, 0)]
    assert generate(engine, [PROMPT], alice) == [(expected, 56)]
    assert generate(engine, [PROMPT], alice.replace(cache_salt="s")) == [(expected, 0)]
    assert engine.stats()["kv_store"]["host_hits"] == 7
    engine.close()


def test_others_run_while_a_prefix_is_read(plain, folder, monkeypatch):
    engine = engine_with(folder)
    generate(engine, [PROMPT])
    forget(engine)
    go, real = threading.Event(), engine.prefix_store.store.load
    monkeypatch.setattr(
        engine.prefix_store.store,
        "load",
        lambda prefix: (go.wait(20) if len(prefix.keys) > 5 else None, real(prefix))[1],
    )
    engine.add_request("slow", PROMPT, GREEDY)
    engine.add_request("aborted", PROMPT[:-1], GREEDY)
    engine.add_request("quick", [4, 5, 6], GREEDY)
    done = []
    while "quick" not in done:
        done += [o.request_id for o in engine.step() if o.finished]
    assert (
        done == ["quick"] and engine.prefix_store.loading == 2 and engine.has_unfinished_requests()
    )
    engine.abort_request("aborted")
    engine.check_integrity()
    go.set()
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert outputs["slow"].outputs[0].token_ids == generate(plain, [PROMPT])[0][0]
    assert outputs["slow"].num_cached_tokens == 56
    engine.check_integrity()
    assert not list(engine.schedulers[0].sequences)
    engine.close()


def test_a_snapshot_while_a_prefix_is_read(plain, folder, tmp_path, monkeypatch):
    engine = engine_with(folder)
    generate(engine, [PROMPT])
    forget(engine)
    go, real = threading.Event(), engine.prefix_store.store.load
    monkeypatch.setattr(
        engine.prefix_store.store, "load", lambda prefix: (go.wait(20), real(prefix))[1]
    )
    engine.add_request("slow", PROMPT, GREEDY)
    engine.step()
    take(engine, tmp_path / "snap").wait(60)
    expected = generate(plain, [PROMPT])[0][0]
    assert restore(plain, tmp_path / "snap") == ["slow"]
    go.set()
    for e in (engine, plain):
        outputs = []
        while e.has_unfinished_requests():
            outputs += e.step()
        assert outputs[-1].outputs[0].token_ids == expected
    engine.close()


def test_a_full_pool_takes_what_fits(plain, folder):
    first = engine_with(folder)
    prompts = [[i, *PROMPT[: 50 + i]] for i in range(6)]
    expected = [t for t, _ in generate(plain, prompts)]
    generate(first, prompts)
    first.close()
    small = tiny_engine(kv_store=str(folder), num_blocks=12)
    assert [t for t, _ in generate(small, prompts)] == expected
    assert small.stats()["kv_store"]["loaded"] > 0
    small.close()


def test_an_unusable_folder_costs_nothing_but_a_warning(plain, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    engine = engine_with(tmp_path / "file")
    for _ in range(3):
        assert generate(engine, [PROMPT])[0][0] == generate(plain, [PROMPT])[0][0]
        forget(engine)
    assert engine.stats()["kv_store"]["disk_errors"] == 1
    gauges = {
        f.name: f.samples[0].value for f in EngineCollector(engine).collect() if f.type == "gauge"
    }
    assert (
        gauges["deepinfer_kv_store_disk_disabled"] == 1
        and gauges["deepinfer_kv_store_loading"] == 0
    )
    assert sum("requests go on without it" in r.message for r in caplog.records) == 1
    engine.close()


def test_prompt_engines_save_and_load(plain, folder):
    expected = generate(plain, [PROMPT])[0][0]
    args = {"engine_type": EngineType.PROMPT, "decode_buckets": None}
    for cached in (0, 56):
        engine = engine_with(
            folder, **args
        )  # a bare PROMPT engine ends each request with its first token
        assert generate(engine, [PROMPT]) == [(expected[:1], cached)]
        engine.close()
    assert len(list(entries(folder))) == len(PROMPT) // 8


def test_a_turn_decoded_by_a_completion_engine_starts_warm_on_another_prompt_engine(plain, folder):
    fields = {
        k: v
        for k, v in TINY.items()
        if k not in ("zero_overhead_scheduling", "stop_preempted_request", "warm_up")
    }
    fields |= {"disaggregate": "1P:1D", "kv_store": str(folder), "num_blocks": 40}
    with LLM(str(GOLDEN / "llama"), **fields) as llm:
        answer = (
            llm.generate([PROMPT[:30]], GREEDY.replace(max_tokens=30), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
    turn = [*PROMPT[:30], *answer, 5, 6, 7]
    with LLM(str(GOLDEN / "llama"), **fields) as llm:
        output = llm.generate([turn], GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 56  # 30 of the prompt, 26 that were decoded
    assert output.outputs[0].token_ids == generate(plain, [turn])[0][0]


def test_write_back_reaches_the_disk_at_the_latest_when_the_engine_closes(folder):
    engine = engine_with(folder, kv_host_bytes=1 << 24, kv_store_write="back")
    generate(engine, [PROMPT])
    assert not list(entries(folder))
    engine.close()
    assert len(list(entries(folder))) == 8
    with pytest.raises(ValueError, match="kv_host_bytes"):
        engine_with(folder, kv_store_write="back")


def test_a_second_process_answers_from_the_store(plain, folder):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent / 'helpers')!r})\nfrom"
        " snapshot_cases import tiny_engine\nfrom deepinfer_jax import SamplingParams\nengine ="
        f" tiny_engine(kv_store={str(folder)!r}, num_blocks=40)\nengine.add_request('a',"
        f" {PROMPT!r}, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))\noutputs ="
        " []\nwhile engine.has_unfinished_requests(): outputs +="
        " engine.step()\nprint(outputs[-1].outputs[0].token_ids,"
        " outputs[-1].num_cached_tokens)\nengine.kv.wait_saved()\nimport os, signal;"
        " os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    expected = generate(plain, [PROMPT])[0][0]
    for cached in (0, 56):
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert result.stdout.strip() == f"{expected} {cached}", result.stderr
