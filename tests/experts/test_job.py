"""Experts spread over two processes move as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from deployment import free_port
from engine_cases import GREEDY, Golden

from deepinfer_jax.experts.placement_file import PlacementRecord

HELPERS = Path(__file__).parents[1] / "helpers"


def test_two_processes_rearrange_together_and_the_tokens_stay(tmp_path):
    path, port, golden = tmp_path / "placement", str(free_port()), Golden("deepseek_v3")
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, str(HELPERS / "expert_job.py"), port]
    processes = [
        subprocess.Popen([*command, str(i), str(path)], stdout=subprocess.PIPE, text=True, env=env)
        for i in range(2)
    ]
    try:
        lines = [next((x for x in p.stdout if x.startswith("answer ")), None) for p in processes]
        assert None not in lines, f"exit codes {[p.poll() for p in processes]}"
        assert [p.wait(60) for p in processes] == [0, 0]
    finally:
        for p in processes:
            p.kill()
            p.communicate()
    first, second = (json.loads(x.removeprefix("answer ")) for x in lines)
    assert first["slots"] == second["slots"] and first["version"] == second["version"] >= 1
    assert first["compiles"] == second["compiles"] == 0
    tokens = first["tokens"] | second["tokens"]
    expected = [t[: GREEDY.max_tokens] for t in golden.greedy]
    assert [tokens[str(i)] for i in range(len(golden.prompts))] == expected
    record = PlacementRecord.load(path)
    np.testing.assert_array_equal(record.slots, first["slots"])
    assert record.version == first["version"]
