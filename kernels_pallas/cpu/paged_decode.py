"""Decode attention on a CPU in C++ (paged_decode.cc): threads over sequences and heads, pages read
where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels_pallas.arrays import Attended, Keys, Lens, Queries, Sinks, Tables, Values
from deepinfer_jax.kernels_pallas.cpu import native

_WIDTH = 16


def unsupported_reason(
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    kv_lens: Lens,
    *,
    scale: float,
    q_per_seq: int = 1,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> str | None:
    """Why the compiled attention cannot take these arguments; None if it can."""
    del q, block_tables, kv_lens, scale, q_per_seq, sliding_window, sinks
    return pools_unsupported_reason(k_pool, v_pool, v_dim) or native.unsupported_reason(
        "paged_decode"
    )


def pools_unsupported_reason(k_pool: Keys, v_pool: Values | None, v_dim: int | None) -> str | None:
    """Why no compiled attention can read these pools; None if it can."""
    dv = v_dim if v_pool is None else v_pool.shape[3]
    if k_pool.dtype not in (jnp.float32, jnp.bfloat16) or (
        v_pool is not None and v_pool.dtype != k_pool.dtype
    ):
        return f"pools must be float32 or bfloat16, got {k_pool.dtype}"
    if k_pool.shape[3] % _WIDTH or dv % _WIDTH:
        return f"head sizes must be multiples of {_WIDTH}, got {k_pool.shape[3]} and {dv}"
    return None


def paged_decode_native(
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    kv_lens: Lens,
    *,
    scale: float,
    q_per_seq: int = 1,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> Attended:
    """See `paged_decode`; scores and sums in float32."""
    dv = v_dim if v_pool is None else v_pool.shape[3]
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:2], dv), jnp.float32)
    call = jax.ffi.ffi_call(native.custom_call("paged_decode"), out, vmap_method="sequential")
    operands = [
        q.astype(jnp.float32),
        block_tables.astype(jnp.int32),
        kv_lens.astype(jnp.int32),
        sinks,
        k_pool,
    ]
    operands += [] if v_pool is None else [v_pool]
    return call(*operands, scale=np.float32(scale), window=np.int64(sliding_window or 0)).astype(
        q.dtype
    )
