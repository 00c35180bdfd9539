"""Every kernel compiles for GPUs that are not there (`make aot`), without spills, with tensor-core
instructions; steps copy no pool.

Needs the CUDA plugin that matches jax, ptxas and libdevice; skipped where they are absent. Runs in
a process of its own, because Mosaic reads its dump folder once and the plugin's start-up belongs to
no other test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parents[2] / "benchmarks" / "gpu_steps.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin is not installed",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_all_kernels_compile(target, tmp_path):
    out = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "deepinfer_jax.kernels_pallas.aot",
        "--target",
        target,
        "--json",
        str(out),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    reports = json.loads(out.read_text())
    by_kernel = {r["implementation"] for r in reports}
    assert by_kernel == ({"mosaic", "mosaic_mla", "xla"} if target == "h200" else {"xla"})
    for r in reports:
        assert not r["spill_bytes"]
        # nothing of a pool's or an expert stack's size is copied: they are by far the largest
        # arguments
        assert r["implementation"] == "xla" or r["temp_bytes"] < 0.4 * r["argument_bytes"], r


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
def test_a_whole_decode_step_moves_no_pool(model):
    """GQA and MLA: the engine's decode program for an H200, two layers at full width, pools larger
    than all else together."""
    command = [sys.executable, str(STEPS), "--model", model]
    done = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0 and ": in place" in done.stdout, (
        done.stdout[-3000:] + done.stderr[-1000:]
    )
