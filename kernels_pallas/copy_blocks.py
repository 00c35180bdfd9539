"""Copy whole rows (KV blocks, state rows) of all layers' pools into one array per
cache, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .dispatch import dispatch


def take_blocks(
    caches: Sequence[Sequence[jax.Array]],
    ids: jax.Array,
    count: jax.Array,
    *,
    implementation: str | None = None,
) -> list[jax.Array]:
    """Rows `ids` int32[size] of each cache's pools (one [N, *entry] per layer) -> per cache an
    array [size, layers, *entry]. Rows from `count` (int32 scalar) on are undefined."""
    return dispatch("take_blocks", caches, ids, count, implementation=implementation)


def put_blocks(
    caches: Sequence[Sequence[jax.Array]],
    ids: jax.Array,
    rows: Sequence[jax.Array],
    *,
    implementation: str | None = None,
) -> list[list[jax.Array]]:
    """The caches' pools with row i of `rows` (per cache [size, layers, *entry]) at ids[i]
    (int32[size], distinct); ids of N and above are dropped. In place when the pools are donated."""
    return dispatch("put_blocks", caches, ids, rows, implementation=implementation)


def take_xla(
    caches: Sequence[Sequence[jax.Array]], ids: jax.Array, count: jax.Array
) -> list[jax.Array]:
    return [jnp.stack([pool[ids] for pool in pools], axis=1) for pools in caches]


def put_xla(
    caches: Sequence[Sequence[jax.Array]], ids: jax.Array, rows: Sequence[jax.Array]
) -> list[list[jax.Array]]:
    return [
        [pool.at[ids].set(row[:, layer], mode="drop") for layer, pool in enumerate(pools)]
        for pools, row in zip(caches, rows, strict=True)
    ]


def take_loop(
    caches: Sequence[Sequence[jax.Array]], ids: jax.Array, count: jax.Array
) -> list[jax.Array]:
    """One by one, only those that count: on a CPU XLA's gather is slower."""
    out = [
        jnp.zeros((ids.shape[0], len(pools), *pools[0].shape[1:]), pools[0].dtype)
        for pools in caches
    ]

    def one(i, out):
        return [
            _fill(array, i, [jax.lax.dynamic_slice_in_dim(p, ids[i], 1) for p in pools])
            for array, pools in zip(out, caches, strict=True)
        ]

    return jax.lax.fori_loop(0, count, one, out)


def _fill(array: jax.Array, i: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
    for layer, row in enumerate(rows):
        array = jax.lax.dynamic_update_slice(array, row[:, None], (i, layer, *[0] * (row.ndim - 1)))
    return array


def put_loop(
    caches: Sequence[Sequence[jax.Array]], ids: jax.Array, rows: Sequence[jax.Array]
) -> list[list[jax.Array]]:
    """One by one, only those that are kept: on a CPU XLA's scatter takes 15 times as long."""
    dropped = ids >= caches[0][0].shape[0]
    kept = jnp.argsort(dropped, stable=True)

    def one(i, caches):
        taken = [jax.lax.dynamic_slice_in_dim(row, kept[i], 1) for row in rows]
        return [
            [
                jax.lax.dynamic_update_slice_in_dim(pool, row[:, layer], ids[kept[i]], 0)
                for layer, pool in enumerate(pools)
            ]
            for pools, row in zip(caches, taken, strict=True)
        ]

    return jax.lax.fori_loop(0, jnp.sum(~dropped), one, [list(pools) for pools in caches])
