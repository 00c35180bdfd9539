"""Placement tables: shapes fixed by the counts alone, replicas taken in turn, loads counted per
logical expert."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from step_batches import make_mesh

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.placement import (
    expert_load,
    initial_physical_to_logical,
    make_placement,
    num_physical_experts,
    physical_ids,
)
from deepinfer_jax.models.loading import load_model


def test_physical_count_divides_by_ep():
    assert [num_physical_experts(8, ep) for ep in (1, 3, 8)] == [8, 9, 8]
    assert num_physical_experts(256, 32, 16) == 288
    with pytest.raises(ValueError, match="extra"):
        num_physical_experts(8, 1, -1)


def test_initial_layout_is_identity_then_wraps():
    assert initial_physical_to_logical(5, 12).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_tables_agree_and_keep_their_shapes_for_any_layout():
    rng = np.random.default_rng(0)
    for _ in range(20):
        p2l = rng.permutation(np.concatenate([np.arange(6), rng.integers(6, size=4)]))
        t = make_placement(p2l, 6)
        assert t.logical_to_physical.shape == (6, 5) and t.replica_count.sum() == 10
        for e in range(6):
            slots = t.logical_to_physical[e, : t.replica_count[e]]
            assert sorted(slots) == np.flatnonzero(p2l == e).tolist()


def test_layouts_that_lose_an_expert_are_refused():
    with pytest.raises(ValueError, match=r"without a physical slot: \[2\]"):
        make_placement(np.array([0, 1, 1]), 3)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        make_placement(np.array([0, 1, 3]), 3)


def test_replicas_are_taken_in_turn_by_rank_and_token():
    tables = make_placement(np.array([0, 1, 0, 0]), 2)
    experts = np.array([[0, 1]] * 7 + [[-1, 0]], np.int32)
    for rank in (0, 3, 250):
        got = np.asarray(
            physical_ids(
                jnp.asarray(experts), tables.logical_to_physical, tables.replica_count, rank
            )
        )
        want = [[[0, 2, 3][(rank + t * 23333) % 3], 1] for t in range(7)] + [
            [-1, [0, 2, 3][(rank + 7 * 23333) % 3]]
        ]
        assert got.tolist() == want


def test_a_permutation_without_replicas():
    tables = make_placement(np.array([2, 0, 1]), 3)
    got = physical_ids(
        jnp.array([[0, 1, 2], [-1, 2, -1]]), tables.logical_to_physical, tables.replica_count, 5
    )
    assert got.tolist() == [[1, 2, 0], [-1, 0, -1]]


def test_load_counts_tokens_and_not_padding():
    assert expert_load(jnp.array([[0, 3], [3, -1], [-1, -1]]), 4).tolist() == [1, 0, 0, 2]


def test_dummy_replicas_are_equal_and_dummy_experts_the_same_at_any_ep(tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "deepseek_v3" / "config.json"
    shutil.copy(golden, tmp_path)

    def experts(ep: int, extra: int) -> np.ndarray:
        axes = ParallelAxes(dp=ep, ep=ep)
        loaded = load_model(
            tmp_path,
            dtype="float32",
            load_format="dummy",
            mesh=make_mesh(axes),
            axes=axes,
            config_overrides={"moe": MoeOptions(extra_experts=extra)},
        )
        return np.asarray(loaded.params["layers"][1]["mlp"]["experts"]["gate_up"])

    one, four = experts(1, 0), experts(4, 4)
    np.testing.assert_array_equal(four, one[np.arange(12) % 8])
    assert len(np.unique(one[:, 0, 0])) == 8
