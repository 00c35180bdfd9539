"""benchmarks/gpu_kernels.py runs here as far as a machine without a GPU allows: all correctness
cases, and its timing loop on one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_kernels"] = module
    spec.loader.exec_module(module)
    return module


def test_smoke(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--smoke", "--seed", "7"])
    assert script.main() == 0
    assert "23 of 23 correct" in capsys.readouterr().out


def test_refuses_to_time_a_cpu(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py"])
    with pytest.raises(SystemExit):
        script.main()


def test_timing_loop_runs_and_floors_count_the_work(script):
    work = script.attention_work(
        "paged_decode", "tiny", sequences=2, rows=1, keys=33, heads=4, kv_heads=2, d=16
    )
    assert script.seconds(work, "xla", loops=2, repeats=1) >= 0
    assert work.flops == 2 * 2 * 33 * 4 * (16 + 16)
    pools = 2 * (2 * 3 * 16 * 2 * 16) * 2  # K and V, bf16, whole pages
    assert work.bytes == pools + 2 * (2 * 4 * 16) * 2  # and queries and results
    dense = script.dense_work("tiny", rows=4, n=128, k=256)
    assert script.seconds(dense, "xla", loops=2, repeats=1) >= 0
    write = script.write_work("tiny", rows=4, blocks=2, dtype=jnp.bfloat16)
    assert script.seconds(write, "xla", loops=2, repeats=1) >= 0
