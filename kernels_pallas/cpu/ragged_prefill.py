"""Prefill attention on a CPU in C++ (ragged_prefill.cc): threads over rows and heads, pages read
where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels_pallas.arrays import (
    Attended,
    Keys,
    Lens,
    Queries,
    SeqIds,
    Sinks,
    Starts,
    Tables,
    Values,
)
from deepinfer_jax.kernels_pallas.cpu import native
from deepinfer_jax.kernels_pallas.cpu.paged_decode import pools_unsupported_reason


def unsupported_reason(
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    kv_lens: Lens,
    q_starts: Starts,
    seq_ids: SeqIds,
    *,
    scale: float,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> str | None:
    """Why the compiled attention cannot take these arguments; None if it can."""
    del q, block_tables, kv_lens, q_starts, seq_ids, scale, sliding_window, sinks
    return pools_unsupported_reason(k_pool, v_pool, v_dim) or native.unsupported_reason(
        "ragged_prefill"
    )


def ragged_prefill_native(
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    kv_lens: Lens,
    q_starts: Starts,
    seq_ids: SeqIds,
    *,
    scale: float,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> Attended:
    """See `ragged_prefill`; scores and sums in float32."""
    dv = v_dim if v_pool is None else v_pool.shape[3]
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:2], dv), jnp.float32)
    call = jax.ffi.ffi_call(native.custom_call("ragged_prefill"), out, vmap_method="sequential")
    operands = [
        q.astype(jnp.float32),
        *(a.astype(jnp.int32) for a in (block_tables, kv_lens, q_starts)),
        sinks,
        k_pool,
    ]
    operands += [] if v_pool is None else [v_pool]
    return call(*operands, scale=np.float32(scale), window=np.int64(sliding_window or 0)).astype(
        q.dtype
    )
