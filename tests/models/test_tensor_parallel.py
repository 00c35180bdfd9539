"""Dense models split over tp inside shard_map equal the whole model, also with fewer key/value
heads than ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from paged_driver import GOLDEN, PagedDriver, golden_prompts

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.attention import HeadLayout
from deepinfer_jax.models.loading import load_model
from deepinfer_jax.models.rules import Rule, row_pieces


class MeshDriver(PagedDriver):
    """The same driver with the step inside shard_map over (replica, ep, tp) = (1, 1, tp)."""

    def __init__(self, name: str, tp: int, **load) -> None:
        self.axes = ParallelAxes(tp=tp)
        self.mesh = Mesh(np.array(jax.devices()[:tp]).reshape(1, 1, tp), ("replica", "ep", "tp"))
        model = load_model(GOLDEN / name, dtype="float32", mesh=self.mesh, axes=self.axes, **load)
        super().__init__(model, block_size=8)
        specs = model.model_class.cache_specs(model.config, self.axes, jnp.dtype("float32"))
        self.caches = {
            s.name: tuple(
                jnp.full((self.num_blocks, self.block_size, *s.entry_shape), jnp.nan)
                for _ in range(s.layers)
            )
            for s in specs
        }

    def _run(self, params, caches, batch):
        def local(params, caches, batch):
            module = nnx.merge(self.model.graphdef, params)
            hidden, caches = module(caches, batch)
            return module.compute_logits(hidden), caches

        heads, whole = PartitionSpec(None, None, "tp"), PartitionSpec()
        specs = (self.model.param_specs, heads, whole)
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=(whole, heads), check_vma=False
        )(params, caches, batch)


@pytest.mark.parametrize(
    ("name", "tp", "load"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),
        ("llama_bias", 4, {}),
        ("qwen3_dense", 2, {}),
        ("llama", 2, {"quant": "int8"}),
    ],
)
def test_split_model_equals_whole(name: str, tp: int, load: dict) -> None:
    cases = golden_prompts(name)[:2]
    split, whole = (
        MeshDriver(name, tp, **load),
        PagedDriver(load_model(GOLDEN / name, dtype="float32", **load), block_size=8),
    )
    rows = {i: case["prompt"] for i, case in enumerate(cases)}
    ours, expected = split.prefill(rows), whole.prefill(rows)
    for i, case in enumerate(cases):
        np.testing.assert_allclose(
            ours[i], expected[i] if load else case["logits"], atol=2e-4, rtol=0
        )
    steps = {i: int(case["greedy"][0]) for i, case in enumerate(cases)}
    ours, expected = split.decode(steps), whole.decode(steps)
    for i in steps:
        np.testing.assert_allclose(ours[i], expected[i], atol=2e-4, rtol=0)


def test_each_rank_holds_whole_heads() -> None:
    """2 ranks, q rows 0-3 and k rows 0-1: rank 0 gets q 0 1, k 0; rank 1 gets q 2 3, k 1."""
    rule = Rule("t", ("q", "k"), rows=(4, 2), units=(4, 2))
    order = [(p.source, p.start, p.count) for p in row_pieces(rule, 6, 2)]
    assert order == [(0, 0, 2), (1, 0, 1), (0, 2, 2), (1, 1, 1)]
    repeated = Rule("t", ("q", "k"), rows=(8, 4), units=(4, 2))
    assert [p.start for p in row_pieces(repeated, 16, 4) if p.source == 1] == [0, 0, 2, 2]


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=3"):
        HeadLayout(4, 2, 16, tp=3)
    with pytest.raises(ValueError, match="tp=8"):
        load_model(GOLDEN / "llama", dtype="float32", axes=ParallelAxes(tp=8))
    with pytest.raises(ValueError, match="scale block 64"):
        load_model(GOLDEN / "llama", dtype="float32", quant="int4", axes=ParallelAxes(tp=2))
