"""The ragged dispatch path compiles for eight H200s, ahead of time, on a machine without a GPU.

Needs the CUDA plugin that matches jax (`pip install jax-cuda13-plugin`), ptxas and libdevice;
skipped where they are absent. The compile runs in a process of its own, because XLA reads its flags
once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_jax.models.layers.dispatch import RAGGED_FLAG

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ops" / "moe_step.py"


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin is not installed",
)
def test_both_paths_compile_for_eight_h200():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": RAGGED_FLAG}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--aot"],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {
        line.split()[0]: line
        for line in done.stdout.splitlines()
        if line.startswith(("padded", "ragged"))
    }
    assert set(rows) == {"padded", "ragged"}
    assert "all-to-all" in rows["padded"] and "ragged-all-to-all" in rows["ragged"]
