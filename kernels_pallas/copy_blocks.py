"""Copy whole rows (KV blocks, state rows) of many pools into arrays of their own, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .dispatch import dispatch


def take_blocks(pools: Sequence[jax.Array], ids: jax.Array, count: jax.Array, *, implementation: str | None = None) -> list[jax.Array]:
    """Rows `ids` int32[size] of every pool [N, *entry] -> arrays [size, *entry]. Rows from `count` (int32 scalar) on are undefined."""
    return dispatch("take_blocks", pools, ids, count, implementation=implementation)


def put_blocks(
    pools: Sequence[jax.Array], ids: jax.Array, rows: Sequence[jax.Array], *, implementation: str | None = None
) -> list[jax.Array]:
    """The pools with row i of `rows` [size, *entry] at ids[i] (int32[size], distinct); ids of N and above are dropped. In place
    when the pools are donated."""
    return dispatch("put_blocks", pools, ids, rows, implementation=implementation)


def take_xla(pools: Sequence[jax.Array], ids: jax.Array, count: jax.Array) -> list[jax.Array]:
    return [pool[ids] for pool in pools]


def put_xla(pools: Sequence[jax.Array], ids: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
    return [pool.at[ids].set(row, mode="drop") for pool, row in zip(pools, rows, strict=True)]


def take_loop(pools: Sequence[jax.Array], ids: jax.Array, count: jax.Array) -> list[jax.Array]:
    """One by one, only those that count: on a CPU XLA's gather is slower."""
    out = tuple(jnp.zeros((ids.shape[0], *pool.shape[1:]), pool.dtype) for pool in pools)

    def one(i, out):
        rows = [jax.lax.dynamic_slice_in_dim(pool, ids[i], 1) for pool in pools]
        return tuple(jax.lax.dynamic_update_slice_in_dim(o, row, i, 0) for o, row in zip(out, rows, strict=True))

    return list(jax.lax.fori_loop(0, count, one, out))


def put_loop(pools: Sequence[jax.Array], ids: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
    """One by one, only those that are kept: on a CPU XLA's scatter takes 15 times as long."""
    dropped = ids >= pools[0].shape[0]
    kept = jnp.argsort(dropped, stable=True)

    def one(i, pools):
        taken = [jax.lax.dynamic_slice_in_dim(row, kept[i], 1) for row in rows]
        return tuple(jax.lax.dynamic_update_slice_in_dim(pool, row, ids[kept[i]], 0) for pool, row in zip(pools, taken, strict=True))

    return list(jax.lax.fori_loop(0, jnp.sum(~dropped), one, tuple(pools)))
