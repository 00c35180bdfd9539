"""A placement file seen by the planner: its table and picture, and floors of uneven ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from expert_policies import skewed_loads

from deepinfer_jax.cli import main
from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.experts.policy import RankLayout, balance, imbalance
from deepinfer_jax.launch.planner.experts import table, view
from deepinfer_jax.launch.planner.floor import ModelCosts, step_floor
from deepinfer_jax.launch.planner.gpus import find_gpu
from deepinfer_jax.launch.planner.plan import make_plan
from deepinfer_jax.models.loading import abstract_model
from deepinfer_jax.runner.memory import expert_move_bytes
from deepinfer_jax.runner.mesh import make_mesh
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.runner.programs import StepPrograms

GOLDEN = Path(__file__).parents[2] / "golden"
LOADS = skewed_loads(np.random.default_rng(0), 2, 20, 8, 256, 2)
PLAN = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "chunked_prefill": True,
    "expert_parallel_size": 4,
    "device_memory_bytes": 40_000_000,
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    record = PlacementRecord(3, 4, balance(LOADS, 12, RankLayout(4)), LOADS)
    record.save(tmp_path / "placement")
    return str(tmp_path / "placement")


def test_the_table_names_the_busiest_experts_and_both_balances(path):
    shown = view(PlacementRecord.load(path))
    lines = table(shown).splitlines()
    assert lines[0] == (
        "placement 3: 2 layers, 8 experts in 12 slots on 4 ranks, counts of 20 steps"
    )
    first = np.tile(np.arange(12) % 8, (2, 1))
    for layer, line in enumerate(lines[3:5]):
        hot = int(LOADS[layer].sum(0).argmax())
        share = 100 * LOADS[layer].sum(0)[hot] / LOADS[layer].sum()
        replicas = int((shown.slots[layer] == hot).sum())
        before, now = (imbalance(LOADS, s, 4)[layer] for s in (first, shown.slots))
        assert line.split()[:3] == [str(layer), f"{before:.3f}", f"{now:.3f}"]
        assert f"{hot}: {share:.1f} % x{replicas}" in line


def test_the_command_shows_other_ranks_and_draws(path, tmp_path, capsys):
    picture = tmp_path / "experts.png"
    assert main(["plan", "--experts", path, "--ep", "8", "--plot", str(picture)]) == 0
    assert "8 experts in 16 slots on 8 ranks" in capsys.readouterr().out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["plan"]) == 2
    assert "--model and --gpu, or --experts FILE alone" in capsys.readouterr().err


def test_plans_take_the_imbalance_of_their_own_ranks(path):
    args = EngineArgs(str(GOLDEN / "deepseek_v3"), num_redundant_experts=4, **PLAN)
    even = make_plan(args, "h200", compile_programs=False)
    uneven = make_plan(
        dataclasses.replace(args, expert_placement=path), "h200", compile_programs=False
    )
    expected = imbalance(LOADS, PlacementRecord.load(path).slots, 4).mean()
    assert even.costs.imbalance == 1 and uneven.as_dict()["expert_imbalance"] == expected
    assert uneven.floors[0].flops > even.floors[0].flops
    other = dataclasses.replace(
        args, expert_placement=path, expert_parallel_size=2, num_redundant_experts=0
    )
    expected = imbalance(LOADS, balance(LOADS, 8, RankLayout(2)), 2).mean()
    plan = make_plan(other, "h200", compile_programs=False)
    assert plan.costs.imbalance == pytest.approx(expected)


def test_memory_for_moving_a_layer_is_kept_free():
    """A layer's experts as they lie on one of 4 devices: 3 of 12, [64, 64] and [64, 32] floats."""
    args = EngineArgs(str(GOLDEN / "deepseek_v3"), num_redundant_experts=4, **PLAN)
    moving = dataclasses.replace(args, expert_rearrangement_interval=9, max_num_seqs=1)
    still = dataclasses.replace(moving, expert_rearrangement_interval=0)
    source, config = ModelSource.find(moving), {}
    for each in (moving, still):
        resolved = EngineConfig.resolve(each, source.config)
        graphdef, params, specs = abstract_model(
            source.config, source.model_class, resolved.axes, resolved.dtype
        )
        mesh = make_mesh(resolved.axes)
        programs = StepPrograms(resolved, source.config, graphdef, params, specs, (), mesh)
        config[each.expert_rearrangement_interval] = expert_move_bytes(programs)
    assert config == {9: 3 * (64 * 64 + 64 * 32) * 4, 0: 0}


def test_a_floor_is_that_of_the_most_loaded_rank():
    costs = ModelCosts(
        dense_params=1e9,
        dense_bytes=2e9,
        head_params=0,
        head_bytes=0,
        expert_params=1e7,
        expert_bytes=2e7,
        local_experts=8,
        num_experts=64,
        top_k=8,
        moe_layers=10,
        hidden_size=4096,
        keys=(),
        kv_bytes_per_token=0,
        ep=8,
    )
    step = {"tokens": 4, "context": 0, "sequences": 4, "decode": True}
    even, uneven = (
        step_floor(dataclasses.replace(costs, imbalance=x), find_gpu("h200"), **step)
        for x in (1.0, 1.5)
    )
    assert uneven.flops - even.flops == pytest.approx(0.5 * 2 * 4 * 8 * 1e7)
    assert uneven.exchanged_bytes == pytest.approx(1.5 * even.exchanged_bytes)
    reached = [8 * (1 - (7 / 8) ** (32 * x)) for x in (1.0, 1.5)]
    assert uneven.bytes - even.bytes == pytest.approx(2e7 * (reached[1] - reached[0]))
