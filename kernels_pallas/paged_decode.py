"""Decode attention: a few query rows per sequence against the pages its block table names."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from .arrays import Attended, Keys, Lens, Queries, Sinks, Tables, Values
from .dispatch import dispatch

_CHUNK = 16  # sequences per chunk
_TILE_FEW, _TILE_MANY = 128, 64  # keys per tile with up to 4 sequences, and above
_MULTIPLY_ROWS = 4


def check_attention_args(
    op: str,
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    v_dim: int | None,
) -> int:
    """Validate what decode and prefill share; returns the width of a value."""
    if (
        q.ndim != 3
        or k_pool.ndim != 4
        or q.shape[2] != k_pool.shape[3]
        or q.shape[1] % k_pool.shape[2]
    ):
        raise ValueError(
            f"{op}: q [rows, H, D] and k_pool [N, bs, KH, D] with KH dividing H expected, got"
            f" {q.shape} and {k_pool.shape}"
        )
    if block_tables.ndim != 2:
        raise ValueError(f"{op}: block_tables [S, P] expected, got {block_tables.shape}")
    if v_pool is None:
        if v_dim is None or not 0 < v_dim <= k_pool.shape[3]:
            raise ValueError(
                f"{op}: without a v_pool, v_dim in 1..{k_pool.shape[3]} is needed, got {v_dim}"
            )
        return v_dim
    if v_pool.shape[:3] != k_pool.shape[:3] or v_dim not in (None, v_pool.shape[3]):
        raise ValueError(
            f"{op}: v_pool {v_pool.shape} (v_dim {v_dim}) does not match k_pool {k_pool.shape}"
        )
    return v_pool.shape[3]


def in_bounds(block_tables: Tables, kv_lens: Lens, k_pool: Keys) -> tuple[Tables, Lens]:
    """Ids outside the pool, and lengths outside the table, as the nearest ones inside."""
    most = block_tables.shape[1] * k_pool.shape[1]
    return jnp.clip(block_tables, 0, k_pool.shape[0] - 1), jnp.clip(kv_lens, 0, most)


def paged_decode(
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
    implementation: str | None = None,
) -> Attended:
    """Softmax attention of `q[S * q_per_seq, H, D]` over the pages of S sequences -> `[S *
    q_per_seq, H, Dv]` in q's dtype.

    k_pool, v_pool: `[N, bs, KH, D]` and `[N, bs, KH, Dv]`; v_pool None: values are the first
    `v_dim` columns of the keys (absorbed MLA: KH = 1, D = kv_lora_rank + rope, Dv = kv_lora_rank).
    block_tables: i32 `[S, P]`; entries past a sequence's pages may be any block id, whose content
    never matters. kv_lens: i32 `[S]`, keys per sequence; 0 marks a padding sequence, whose rows are
    zeros. Off the GPU, ids outside the pool and lengths outside the table count as the nearest ones
    inside. Row j of a sequence's q_per_seq rows sits at position p = kv_len - q_per_seq + j
    and sees keys k with k <= p and, with a window w, k > p - w. sinks: f32 `[H]`, a logit per head
    that takes part in the softmax's denominator only. Scores and sums are float32. Raises
    ValueError on shapes that do not fit together.
    """
    check_attention_args("paged_decode", q, k_pool, v_pool, block_tables, v_dim)
    if q.shape[0] != block_tables.shape[0] * q_per_seq or kv_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            f"paged_decode: {q.shape[0]} rows, tables {block_tables.shape}, kv_lens"
            f" {kv_lens.shape}, q_per_seq {q_per_seq}"
        )
    return dispatch(
        "paged_decode",
        q,
        k_pool,
        v_pool,
        block_tables,
        kv_lens,
        scale=scale,
        q_per_seq=q_per_seq,
        v_dim=v_dim,
        sliding_window=sliding_window,
        sinks=sinks,
        implementation=implementation,
    )


def paged_decode_xla(
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
    """Reads live pages only: sequences sorted by length in chunks of `_CHUNK`, each chunk a loop
    over the key tiles of its longest.

    Measured against a gather of the whole table and a flat list of (sequence, tile) items:
    docs/decisions/003-cpu-attention.md.
    """
    block_tables, kv_lens = in_bounds(block_tables, kv_lens, k_pool)
    s, (_, bs, kh, _), h = block_tables.shape[0], k_pool.shape, q.shape[1]
    dv, chunk = (v_dim if v_pool is None else v_pool.shape[3]), min(_CHUNK, s)
    tile_pages = max(1, (_TILE_FEW if s <= 4 else _TILE_MANY) // bs)
    order = jnp.argsort(-kv_lens) if s > chunk else None
    rows = (
        (q.astype(jnp.float32) * scale)
        .reshape(s, q_per_seq, kh, h // kh, -1)
        .transpose(0, 2, 1, 3, 4)
        .reshape(s, kh, -1, q.shape[2])
    )
    if order is not None:
        rows, block_tables, kv_lens = rows[order], block_tables[order], kv_lens[order]
    pad = -s % chunk
    rows = jnp.pad(rows, ((0, pad), (0, 0), (0, 0), (0, 0)))
    tables = jnp.pad(block_tables, ((0, pad), (0, -block_tables.shape[1] % tile_pages)))
    lens = jnp.pad(kv_lens, (0, pad))
    sink = (
        None
        if sinks is None
        else jnp.tile(sinks.astype(jnp.float32).reshape(kh, h // kh), (1, q_per_seq))[
            None, :, :, None
        ]
    )

    def attend(c):
        part = (lax.dynamic_slice_in_dim(a, c * chunk, chunk) for a in (rows, tables, lens))
        return _attend_chunk(*part, k_pool, v_pool, dv, tile_pages, q_per_seq, sliding_window, sink)

    if s + pad == chunk:
        out = attend(0)
    else:
        out = jnp.zeros((s + pad, kh, rows.shape[2], dv), jnp.float32)
        live_chunks = (jnp.sum(lens > 0) + chunk - 1) // chunk
        out = lax.fori_loop(
            0,
            live_chunks,
            lambda c, o: lax.dynamic_update_slice_in_dim(o, attend(c), c * chunk, 0),
            out,
        )
    out = (
        out[:s]
        .reshape(s, kh, q_per_seq, h // kh, dv)
        .transpose(0, 2, 1, 3, 4)
        .reshape(s, q_per_seq, h, dv)
    )
    if order is not None:
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return out.reshape(s * q_per_seq, h, dv).astype(q.dtype)


def _attend_chunk(
    rows: Float[Array, "W KH R D"],
    tables: Int32[Array, "W P"],
    lens: Int32[Array, " W"],
    k_pool: Keys,
    v_pool: Values | None,
    dv: int,
    tile_pages: int,
    q_per_seq: int,
    sliding_window: int | None,
    sink: Float[Array, "1 KH R 1"] | None,
) -> Float[Array, "W KH R Dv"]:
    """Online softmax of scaled rows (R = q_per_seq * H / KH) over key tiles."""
    w, kh, r, d = rows.shape
    tile = tile_pages * k_pool.shape[1]
    row = jnp.arange(r, dtype=jnp.int32) // (r // q_per_seq)
    position = lens[:, None] - q_per_seq + row  # [W, R]

    def load(
        pool: Keys | Values,
        ids: Int32[Array, "W tile"],
        live: Bool[Array, "W K"] | None,
        width: int,
    ) -> Float[Array, "W K KH width"]:
        pages = (
            pool.at[ids]
            .get(mode="promise_in_bounds")
            .reshape(w, tile, kh, width)
            .astype(jnp.float32)
        )
        return (
            pages if live is None else jnp.where(live[:, :, None, None], pages, 0)
        )  # dead rows may hold NaN; 0 * NaN is NaN

    def step(j, carry):
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(tables, j * tile_pages, tile_pages, axis=1)
        key = j * tile + jnp.arange(tile, dtype=jnp.int32)
        live = key < lens[:, None]
        k = load(k_pool, ids, live if v_pool is None else None, d)
        v = k[..., :dv] if v_pool is None else load(v_pool, ids, live, dv)
        visible = (key <= position[:, :, None])[:, None]
        if sliding_window is not None:
            visible &= (key > position[:, :, None] - sliding_window)[:, None]
        scores = jnp.where(visible, _scores(rows, k), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights, keep = jnp.exp(scores - shift), jnp.exp(top - shift)
        return (
            new_top,
            total * keep + jnp.sum(weights, -1, keepdims=True),
            acc * keep + _weighted_values(weights, v),
        )

    shape = (w, kh, r, 1)
    top = jnp.full(shape, -jnp.inf, jnp.float32) if sink is None else jnp.broadcast_to(sink, shape)
    total = jnp.full(shape, 0.0 if sink is None else 1.0, jnp.float32)
    begin = 0
    if sliding_window is not None:
        first = jnp.min(
            jnp.where(lens > 0, lens - q_per_seq - sliding_window + 1, jnp.iinfo(jnp.int32).max)
        )
        begin = jnp.maximum(first, 0) // tile
    end = (jnp.max(lens) + tile - 1) // tile
    _, total, acc = lax.fori_loop(
        begin, end, step, (top, total, jnp.zeros((w, kh, r, dv), jnp.float32))
    )
    return jnp.where((lens > 0)[:, None, None, None], acc / jnp.where(total > 0, total, 1), 0)


def _scores(
    rows: Float[Array, "W KH R D"], k: Float[Array, "W K KH D"]
) -> Float[Array, "W KH R K"]:
    """Few rows: XLA's fused product and sum
    beats a batch of tiny matmuls."""
    if rows.shape[2] > _MULTIPLY_ROWS:
        return jnp.einsum("shrd,skhd->shrk", rows, k)
    return jnp.sum(
        rows[:, None] * lax.optimization_barrier(k)[:, :, :, None, :], axis=-1
    ).transpose(0, 2, 3, 1)


def _weighted_values(
    weights: Float[Array, "W KH R K"], v: Float[Array, "W K KH Dv"]
) -> Float[Array, "W KH R Dv"]:
    if weights.shape[2] > _MULTIPLY_ROWS:
        return jnp.einsum("shrk,skhv->shrv", weights, v)
    return jnp.sum(
        weights.transpose(0, 3, 1, 2)[..., None] * lax.optimization_barrier(v)[:, :, :, None, :],
        axis=1,
    )
