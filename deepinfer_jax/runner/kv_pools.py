"""From a model's cache declarations to device pools."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.models.base import Caches, CacheSpec, PagedCache, ParallelAxes


def pool_shape(
    spec: CacheSpec, axes: ParallelAxes, num_blocks: int, block_size: int, num_slots: int
) -> tuple[int, ...]:
    """Global shape of one layer's pool: the ranks' blocks (or slots) are folded into
    dimension 0."""
    if isinstance(spec, PagedCache):
        entries = spec.entries_per_block(block_size)
        return (axes.dp * num_blocks, entries, *spec.entry_shape)
    return (axes.dp * num_slots, *spec.shape)


def pool_spec(spec: CacheSpec, axes: ParallelAxes) -> P:
    """PartitionSpec of one layer's pool."""
    inner = len(spec.entry_shape) if isinstance(spec, PagedCache) else len(spec.shape)
    dims: list[str | None] = [None] * inner
    if spec.tp_dim is not None and axes.tp > 1:
        dims[spec.tp_dim] = axes.tp_axis
    lead: tuple[str | None, ...] = (None,) if isinstance(spec, PagedCache) else ()
    return P(axes.dp_axes, *lead, *dims)


def cache_specs_tree(specs: tuple[CacheSpec, ...], axes: ParallelAxes) -> dict[str, tuple[P, ...]]:
    """PartitionSpecs in the structure of `Caches`."""
    return {s.name: (pool_spec(s, axes),) * s.layers for s in specs}


def abstract_caches(
    specs: tuple[CacheSpec, ...],
    axes: ParallelAxes,
    mesh: Mesh,
    num_blocks: int,
    block_size: int,
    num_slots: int,
) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """ShapeDtypeStructs of the pools, with shardings, for ahead-of-time compilation."""
    return {
        s.name: (
            (
                jax.ShapeDtypeStruct(
                    pool_shape(s, axes, num_blocks, block_size, num_slots),
                    s.dtype,
                    sharding=NamedSharding(mesh, pool_spec(s, axes)),
                ),
            )
            * s.layers
        )
        for s in specs
    }


def allocate(abstract: dict[str, tuple[jax.ShapeDtypeStruct, ...]]) -> Caches:
    """Zero-filled pools on their devices (each process fills only its shards)."""

    def one(sds: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.jit(lambda: jnp.zeros(sds.shape, sds.dtype), out_shardings=sds.sharding)()

    return {name: tuple(one(s) for s in layers) for name, layers in abstract.items()}


def bytes_per_block(specs: tuple[CacheSpec, ...], axes: ParallelAxes, block_size: int) -> int:
    """Bytes of one block over all layers and paged caches on one device."""
    total = 0
    for s in specs:
        if isinstance(s, PagedCache):
            entry = math.prod(s.entry_shape) // (axes.tp if s.tp_dim is not None else 1)
            entries = s.entries_per_block(block_size)
            total += s.layers * entries * entry * np.dtype(s.dtype).itemsize
    return total


def state_bytes(specs: tuple[CacheSpec, ...], axes: ParallelAxes, num_slots: int) -> int:
    """Bytes of all per-sequence state caches on one device."""
    total = 0
    for s in specs:
        if not isinstance(s, PagedCache):
            entry = math.prod(s.shape) // (axes.tp if s.tp_dim is not None else 1)
            total += s.layers * num_slots * entry * np.dtype(s.dtype).itemsize
    return total
