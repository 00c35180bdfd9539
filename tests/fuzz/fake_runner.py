"""A runner without a model: pools filled with recognisable values, for tests of what
moves blocks."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.models.base import PagedCache, ParallelAxes, StateCache
from deepinfer_jax.runner import kv_pools
from deepinfer_jax.runner.mesh import RankPlacement, make_mesh

SPECS = (
    PagedCache("k", 2, (4, 6), jnp.float32, tp_dim=0),
    PagedCache("latent", 3, (1, 5), jnp.bfloat16),
    StateCache("ring", 2, (3, 4), jnp.float32, tp_dim=1),
)


class ProgramTable:
    """The part of StepPrograms that a BlockMover uses; counts compilations."""

    def __init__(self, num_state_slots: int) -> None:
        self.num_state_slots, self.compiles = num_state_slots, 0
        self._lower, self._compiled = {}, {}

    def register(self, key, lower) -> None:
        self._lower[key] = lower

    def lower(self, key):
        return self._lower[key]()

    def put(self, key, program) -> None:
        self._compiled[key] = program

    def get(self, key):
        if key not in self._compiled:
            self.compiles += 1
            self._compiled[key] = self._lower[key]().compile()
        return self._compiled[key]


def fake_runner(
    *,
    dp=1,
    tp=1,
    ep=1,
    first_device=0,
    num_blocks=12,
    num_state_slots=5,
    block_size=4,
    specs=SPECS,
    seed=None,
):
    """seed None: zeros; otherwise random content. `host` holds the same pools as NumPy arrays [dp,
    rows, ...]."""
    axes = ParallelAxes(dp=dp, ep=ep, tp=tp)
    mesh = make_mesh(axes, jax.devices()[first_device:])
    abstract = kv_pools.abstract_caches(specs, axes, mesh, num_blocks, block_size, num_state_slots)
    rng = np.random.default_rng(seed)
    caches, host = {}, {}
    for name, layers in abstract.items():
        values = [
            np.zeros(x.shape, x.dtype) if seed is None else rng.normal(size=x.shape).astype(x.dtype)
            for x in layers
        ]
        caches[name] = tuple(
            jax.device_put(v, x.sharding) for v, x in zip(values, layers, strict=True)
        )
        host[name] = [
            v.reshape(dp, -1, *v.shape[1:]).copy() for v in values
        ]  # device_put may use the memory of `values` itself
    return SimpleNamespace(
        cache_specs=specs,
        caches=caches,
        host=host,
        mesh=mesh,
        config=SimpleNamespace(axes=axes, block_size=block_size),
        num_blocks=num_blocks,
        programs=ProgramTable(num_state_slots),
        placement=RankPlacement(mesh, axes),
    )
