"""Decode attention: a few query rows per sequence against the pages its block table names."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .dispatch import dispatch


def check_attention_args(op: str, q, k_pool, v_pool, block_tables, v_dim) -> int:
    """Validate what decode and prefill share; returns the width of a value."""
    if q.ndim != 3 or k_pool.ndim != 4 or q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{op}: q [rows, H, D] and k_pool [N, bs, KH, D] with KH dividing H expected, got {q.shape} and {k_pool.shape}")
    if block_tables.ndim != 2:
        raise ValueError(f"{op}: block_tables [S, P] expected, got {block_tables.shape}")
    if v_pool is None:
        if v_dim is None or not 0 < v_dim <= k_pool.shape[3]:
            raise ValueError(f"{op}: without a v_pool, v_dim in 1..{k_pool.shape[3]} is needed, got {v_dim}")
        return v_dim
    if v_pool.shape[:3] != k_pool.shape[:3] or v_dim not in (None, v_pool.shape[3]):
        raise ValueError(f"{op}: v_pool {v_pool.shape} (v_dim {v_dim}) does not match k_pool {k_pool.shape}")
    return v_pool.shape[3]


def paged_decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    q_per_seq: int = 1,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention of `q[S * q_per_seq, H, D]` over the pages of S sequences -> `[S * q_per_seq, H, Dv]` in q's dtype.

    k_pool, v_pool: `[N, bs, KH, D]` and `[N, bs, KH, Dv]`; v_pool None: values are the first `v_dim` columns of the keys
    (absorbed MLA: KH = 1, D = kv_lora_rank + rope, Dv = kv_lora_rank).
    block_tables: i32 `[S, P]`; entries past a sequence's pages may be any valid block id, whose content never matters.
    kv_lens: i32 `[S]`, keys per sequence; 0 marks a padding sequence, whose rows are zeros. Row j of a sequence's q_per_seq rows
    sits at position p = kv_len - q_per_seq + j and sees keys k with k <= p and, with a window w, k > p - w.
    sinks: f32 `[H]`, a logit per head that takes part in the softmax's denominator only.
    Scores and sums are float32. Raises ValueError on shapes that do not fit together.
    """
    check_attention_args("paged_decode", q, k_pool, v_pool, block_tables, v_dim)
    if q.shape[0] != block_tables.shape[0] * q_per_seq or kv_lens.shape != block_tables.shape[:1]:
        raise ValueError(f"paged_decode: {q.shape[0]} rows, tables {block_tables.shape}, kv_lens {kv_lens.shape}, q_per_seq {q_per_seq}")
    return dispatch(
        "paged_decode", q, k_pool, v_pool, block_tables, kv_lens, scale=scale, q_per_seq=q_per_seq, v_dim=v_dim,
        sliding_window=sliding_window, sinks=sinks, implementation=implementation,
    )  # fmt: skip


def paged_decode_xla(q, k_pool, v_pool, block_tables, kv_lens, *, scale, q_per_seq=1, v_dim=None, sliding_window=None, sinks=None):
    """Gather of the bucketed table."""
    s, p = block_tables.shape
    _, bs, kh, d = k_pool.shape
    h, n = q.shape[1], p * bs
    key = jnp.arange(n, dtype=jnp.int32)
    live = (key < kv_lens[:, None])[:, :, None, None]  # [S, K, 1, 1]
    k = jnp.where(live, k_pool[block_tables].reshape(s, n, kh, d).astype(jnp.float32), 0)
    v = k[..., :v_dim] if v_pool is None else jnp.where(live, v_pool[block_tables].reshape(s, n, kh, -1).astype(jnp.float32), 0)
    rows = q.astype(jnp.float32).reshape(s, q_per_seq, kh, h // kh, d) * scale
    scores = jnp.einsum("sqhgd,skhd->shqgk", rows, k)
    position = kv_lens[:, None] - q_per_seq + jnp.arange(q_per_seq, dtype=jnp.int32)  # [S, Q]
    visible = key <= position[:, :, None]
    if sliding_window is not None:
        visible &= key > position[:, :, None] - sliding_window
    scores = jnp.where(visible[:, None, :, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kh, 1, h // kh, 1)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("shqgk,skhv->sqhgv", weights, v)
    return out.reshape(s * q_per_seq, h, -1).astype(q.dtype)
