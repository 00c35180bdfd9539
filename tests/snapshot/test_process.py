"""Snapshots of processes that are really killed, SIGTERM, roles, and every reason to refuse one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from snapshot_cases import PROMPTS, SAMPLED, complete, empty_record, tiny_engine

from deepinfer_jax import LLM, EngineType
from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.snapshot.files import Snapshot, SnapshotError, load, write
from deepinfer_jax.snapshot.job import take
from deepinfer_jax.snapshot.records import SnapshotMismatch
from deepinfer_jax.snapshot.restore import restore


def server(folder: Path, body: str, **engine: object) -> subprocess.Popen:
    """A process that serves PROMPTS for ever (each again when it ends), then does `body`."""
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent.parent / "helpers")!r})
from snapshot_cases import PROMPTS, SAMPLED, complete, tiny_engine
from deepinfer_jax import SamplingParams
from deepinfer_jax.snapshot.job import take
engine = tiny_engine(**{engine!r})
params = SamplingParams(
    max_tokens=24, temperature=1.0, seed=7, presence_penalty=0.5, ignore_eos=True
)
for i, prompt in enumerate({PROMPTS!r}):
    engine.add_request(str(i), prompt, params)
for _ in range(9):
    engine.step()
folder = {str(folder)!r}
{body}
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(num_blocks=60, data_parallel_size=2)


@pytest.fixture(scope="module")
def expected(engine):
    return complete(engine, {str(i): p for i, p in enumerate(PROMPTS)})


@pytest.mark.parametrize("zos", [False, True])
def test_kill_9_and_restore_in_another_process(zos, engine, expected, tmp_path):
    body = "take(engine, folder).wait()\nprint('saved', flush=True)\nwhile True: engine.step()"
    process = server(tmp_path, body, zero_overhead_scheduling=zos)
    assert process.stdout.readline() == "saved\n", process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert restore(engine, tmp_path) == sorted(expected)
    assert complete(engine) == expected


def test_killed_while_it_writes(engine, expected, tmp_path):
    """The second snapshot is killed at some point: the first or the second is there, whole."""
    body = (
        "take(engine, folder).wait()\nprint('saved', flush=True)\n"
        "while True:\n    engine.step()\n    take(engine, folder)\n"
        "    if not engine.has_unfinished_requests(): engine.add_request('x', [5] * 9, params)"
    )
    for delay in (0.0, 0.05, 0.12):
        process = server(tmp_path / str(delay), body)
        assert process.stdout.readline() == "saved\n", process.communicate()
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        ids = restore(engine, tmp_path / str(delay))
        done = complete(engine)
        assert ids and all(done[i] == expected[i] for i in ids if i in expected)


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    record = empty_record()
    snapshot = Snapshot(record, {"blocks": {"k": np.zeros((2, 1, 3), np.float32)}})
    assert write(snapshot, tmp_path) == 1
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp-123")
    assert load(tmp_path, 1).record == record and write(snapshot, tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_sigterm_saves_before_it_ends_the_process(engine, expected, tmp_path):
    body = "print('serving', flush=True)\nwhile True: engine.step() or time.sleep(0.001)"
    process = server(tmp_path, body, snapshot_on_sigterm=str(tmp_path))
    assert process.stdout.readline() == "serving\n", process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    done = run_restored(engine, tmp_path)
    assert all(done[i] == expected[i] for i in done)


def run_restored(engine, folder):
    restore(engine, folder)
    return complete(engine)


def test_a_busy_loop_of_steps_lets_snapshots_in(engine, tmp_path):
    """Nobody but the stepping thread gets the lock; the pause is far below a second."""
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            engine.step()

    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"b{i}", prompt, SAMPLED)
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        jobs = [take(engine, tmp_path) for _ in range(3)]
        assert [job.wait(60) for job in jobs] == [1, 2, 3]
    finally:
        stop.set()
        thread.join()
    with pytest.raises(SnapshotError, match="no complete snapshot 1"):
        restore(engine, tmp_path, step=1)  # two are kept
    complete(engine)


def test_roles(engine, expected, tmp_path):
    common = {"num_blocks": 60, "stop_preempted_request": True}
    prompt = tiny_engine(
        cls=PromptEngine, engine_type=EngineType.PROMPT, decode_buckets=None, **common
    )
    args = {"prefill_buckets": None, "chunked_prefill": False, "enable_prefix_caching": False}
    completion = tiny_engine(
        cls=CompletionEngine,
        engine_type=EngineType.COMPLETION,
        zero_overhead_scheduling=True,
        **common,
        **args,
    )
    for i, ids in enumerate(PROMPTS[:3]):
        engine.add_request(str(i), ids, SAMPLED)
    while not engine.schedulers[0].num_running:
        engine.step()
    for _ in range(8):
        engine.step()
    take(engine, tmp_path / "decoding").wait(60)
    complete(engine)
    restore(completion, tmp_path / "decoding")
    for _ in range(4):
        completion.step()
    take(completion, tmp_path / "completion").wait(60)
    assert complete(completion) == {k: expected[k] for k in "012"}
    assert run_restored(engine, tmp_path / "completion") == {k: expected[k] for k in "012"}
    prompt.start_hand_over("P", None)
    with pytest.raises(ValueError, match="decodes already"):
        restore(prompt, tmp_path / "decoding")
    engine.add_request("w", PROMPTS[0], SAMPLED)
    take(engine, tmp_path / "waiting").wait(60)
    complete(engine)
    with pytest.raises(ValueError, match="'w' is not prefilled: a COMPLETION engine"):
        restore(completion, tmp_path / "waiting")
    assert not list(completion.schedulers[0].sequences)
    assert restore(prompt, tmp_path / "waiting") == ["w"]
    assert prompt.is_active("w") and prompt.schedulers[0].num_waiting == 1
    take(prompt, tmp_path / "prompt").wait(60)
    assert run_restored(engine, tmp_path / "prompt") == {"w": expected["0"]}


def test_a_prefilled_request_of_a_prompt_engine_is_computed_again_from_its_last_token(
    engine, expected, tmp_path
):
    engine.add_request("0", PROMPTS[0], SAMPLED)
    while (
        engine.live.completions
        and next(iter(engine.live.completions.values())).seq.num_output_tokens != 1
    ):
        engine.step()
    take(engine, tmp_path).wait(60)
    complete(engine)
    prompt = tiny_engine(
        cls=PromptEngine, engine_type=EngineType.PROMPT, decode_buckets=None, num_blocks=60
    )
    prompt.start_hand_over("P", None)
    restore(prompt, tmp_path)
    (c,) = prompt.live.completions.values()
    assert (c.seq.num_output_tokens, c.seq.num_cached, c.seq.num_blocks) == (
        0,
        len(PROMPTS[0]) - 1,
        3,
    )
    take(prompt, tmp_path).wait(60)
    assert run_restored(engine, tmp_path)["0"] == expected["0"]


def test_refusals(engine, tmp_path):
    with pytest.raises(SnapshotError, match="no such folder"):
        restore(engine, tmp_path / "none")
    engine.add_request("a", PROMPTS[0], SAMPLED)
    engine.step()
    take(engine, tmp_path / "s").wait(60)
    with pytest.raises(ValueError, match=r"\['a'\] of the snapshot are already running"):
        restore(engine, tmp_path / "s")
    complete(engine)
    for changes, message in (
        ({"block_size": 4, "num_blocks": 100}, "block_size: 8 there, 4 here"),
        ({"kv_cache_dtype": "bfloat16"}, "'float32'.* there, .*'bfloat16'.* here"),
        ({"name": "llama_rope3"}, "model: '.*' there, '.*' here"),
        (
            {"max_model_len": 32},
            "request 'a': may reach 44 tokens, this engine's max_model_len is 32",
        ),
    ):
        other = tiny_engine(**changes)
        with pytest.raises(ValueError, match=message) as caught:
            restore(other, tmp_path / "s")
        assert isinstance(caught.value, SnapshotMismatch) or "max_model_len" in message
        assert not other.has_unfinished_requests()


def test_a_damaged_snapshot_is_refused(engine, tmp_path):
    engine.add_request("a", PROMPTS[1], SAMPLED)
    engine.step()
    take(engine, tmp_path).wait(60)
    complete(engine)
    files = sorted(
        f for f in (tmp_path / "1").rglob("*") if f.is_file() and f.stat().st_size > 1000
    )
    assert files
    for file in files:
        good = file.read_bytes()
        for at in range(len(good) // 3, len(good), len(good) // 3):
            file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            try:
                restore(engine, tmp_path)
            except SnapshotError as error:
                assert "damaged" in str(error)
            else:  # a byte that nothing depends on
                assert len(complete(engine)["a"]) == 24
        file.write_bytes(good)
    assert run_restored(engine, tmp_path).keys() == {"a"}


def test_llm_goes_on_where_another_one_was(tmp_path):
    options = {"max_model_len": 96, "num_blocks": 60, "block_size": 8, "max_num_seqs": 4}
    path = str(Path(__file__).parent.parent / "golden" / "llama")
    options |= {"prefill_buckets": (96,), "decode_buckets": (4,), "max_num_batched_tokens": 96}
    with LLM(path, **options) as llm:
        whole = [
            o.outputs[0].token_ids
            for o in llm.generate(
                prompt_token_ids=PROMPTS[:3], sampling_params=SAMPLED, use_tqdm=False
            )
        ]
        stream = llm.stream(prompt_token_ids=PROMPTS[:3], sampling_params=SAMPLED)
        seen = {"0": [], "1": [], "2": []}
        for _, output in zip(range(12), stream, strict=False):
            seen[output.request_id] += output.outputs[0].token_ids
        llm.snapshot(tmp_path).wait(60)
        stream.close()
        outputs = llm.restore(tmp_path, use_tqdm=False)
        assert [o.finished for o in outputs] == [True] * 3
        assert [
            o.outputs[0].token_ids
            for o in llm.generate(
                prompt_token_ids=PROMPTS[:3], sampling_params=SAMPLED, use_tqdm=False
            )
        ] == whole
