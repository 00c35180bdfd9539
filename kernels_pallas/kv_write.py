"""Write the keys or values of new tokens into the pages of a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .dispatch import dispatch

_FLOAT8_MAX = 448.0  # largest finite e4m3


def cast_to_cache(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast to the cache's dtype; e4m3 saturates at +-448 (a plain cast would make NaN of anything
    larger)."""
    if dtype == jnp.float8_e4m3fn and rows.dtype != dtype:
        rows = jnp.clip(rows, -_FLOAT8_MAX, _FLOAT8_MAX)
    return rows.astype(dtype)


def kv_write(
    pool: Float[Array, "N bs *E"],
    rows: Float[Array, " T *E"],
    write_slots: Int32[Array, " T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "N bs *E"]:
    """Return `pool[N, bs, *E]` with `rows[T, *E]` at `write_slots[T]` (block * bs + offset); slots
    >= N * bs are dropped.

    Rows are cast to the pool's dtype (e4m3: saturating). Distinct valid slots are required. In
    place when the pool is donated.
    """
    if pool.shape[2:] != rows.shape[1:] or rows.shape[:1] != write_slots.shape:
        raise ValueError(
            f"kv_write: pool {pool.shape} needs rows [T, {pool.shape[2:]}] and slots [T], got"
            f" {rows.shape} and {write_slots.shape}"
        )
    return dispatch("kv_write", pool, rows, write_slots, implementation=implementation)


def kv_write_xla(
    pool: Float[Array, "N bs *E"], rows: Float[Array, " T *E"], write_slots: Int32[Array, " T"]
) -> Float[Array, "N bs *E"]:
    flat = pool.reshape(-1, *pool.shape[2:])
    # unique_indices would be wrong: padding rows share one out-of-range slot
    flat = flat.at[write_slots].set(cast_to_cache(rows, pool.dtype), mode="drop")
    return flat.reshape(pool.shape)
