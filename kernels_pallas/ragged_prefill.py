"""Prefill attention: packed rows of many sequences, causal, over pages that already hold this
step's keys."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .arrays import Attended, Keys, Lens, Queries, SeqIds, Sinks, Starts, Tables, Values
from .dispatch import dispatch
from .paged_decode import check_attention_args, in_bounds

_Q_TILE = 128
_K_TILE = 256


def ragged_prefill(
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
    implementation: str | None = None,
) -> Attended:
    """Causal softmax attention of packed rows `q[T, H, D]` -> `[T, H, Dv]` in q's dtype; padding
    rows are zeros.

    Rows `q_starts[s] : q_starts[s + 1]` (i32 `[S + 1]`) belong to sequence s and are its last rows:
    row j of n sits at position p = kv_lens[s] - n + j and sees keys k with k <= p and, with a
    window w, k > p - w. seq_ids: i32 `[T]`, S in padding rows. Pools, block_tables, v_dim, sinks
    and precision: as in `paged_decode`. Raises ValueError on shapes that do not fit together.
    """
    check_attention_args("ragged_prefill", q, k_pool, v_pool, block_tables, v_dim)
    sequences = block_tables.shape[0]
    if (
        kv_lens.shape != (sequences,)
        or q_starts.shape != (sequences + 1,)
        or seq_ids.shape != q.shape[:1]
    ):
        raise ValueError(
            f"ragged_prefill: tables {block_tables.shape} need kv_lens [S], q_starts [S + 1],"
            f" seq_ids [T]; got {kv_lens.shape}, {q_starts.shape}, {seq_ids.shape} for q {q.shape}"
        )
    return dispatch(
        "ragged_prefill",
        q,
        k_pool,
        v_pool,
        block_tables,
        kv_lens,
        q_starts,
        seq_ids,
        scale=scale,
        v_dim=v_dim,
        sliding_window=sliding_window,
        sinks=sinks,
        implementation=implementation,
    )


def ragged_prefill_xla(
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
    """Flash-style tiles with dynamic trip counts: a loop over live (sequence, q tile) items around
    one over visible key tiles.

    Items come in row order and store whole q tiles: the rows of a tile that lie past its sequence
    are overwritten by the next item.
    """
    block_tables, kv_lens = in_bounds(block_tables, kv_lens, k_pool)
    q_starts = jnp.clip(lax.cummax(q_starts), 0, q.shape[0])
    t, h, d = q.shape
    pages, bs, kh = block_tables.shape[1], k_pool.shape[1], k_pool.shape[2]
    dv, group = (v_dim if v_pool is None else v_pool.shape[3]), h // kh
    bq = min(_Q_TILE, max(8, 1 << (t - 1).bit_length()))
    tile_pages = min(max(1, _K_TILE // bs), pages)
    bk = tile_pages * bs
    tables = jnp.pad(block_tables, ((0, 0), (0, -pages % tile_pages)))
    rows = jnp.pad(q.astype(jnp.float32) * scale, ((0, bq), (0, 0), (0, 0))).reshape(
        t + bq, kh, group, d
    )
    q_lens = q_starts[1:] - q_starts[:-1]
    tile_ends = jnp.cumsum((q_lens + bq - 1) // bq)
    item_seq = jnp.searchsorted(
        tile_ends, jnp.arange(t // bq + block_tables.shape[0]), side="right", method="compare_all"
    )
    sink = (
        None
        if sinks is None
        else jnp.repeat(sinks.astype(jnp.float32).reshape(kh, group), bq, axis=1)[..., None]
    )

    def attend(item, out):
        seq = item_seq[item]
        tile = item - jnp.where(seq > 0, tile_ends[seq - 1], 0)
        start, kv_len = q_starts[seq] + tile * bq, kv_lens[seq]
        first = kv_len - q_lens[seq] + tile * bq  # position of the tile's first row
        q_tile = (
            lax.dynamic_slice(rows, (start, 0, 0, 0), (bq, kh, group, d))
            .transpose(1, 2, 0, 3)
            .reshape(kh, group * bq, d)
        )
        position = jnp.tile(first + jnp.arange(bq, dtype=jnp.int32), group)[None, :, None]

        def step(j, carry):
            top, total, acc = carry
            page_ids = lax.dynamic_slice(tables, (seq, j * tile_pages), (1, tile_pages))[0]
            key = j * bk + jnp.arange(bk, dtype=jnp.int32)
            live = (key < kv_len)[:, None, None]
            k = (
                jnp.where(live, k_pool[page_ids].reshape(bk, kh, d), 0)
                .astype(jnp.float32)
                .transpose(1, 2, 0)
            )
            v = k[:, :dv].transpose(0, 2, 1)
            if v_pool is not None:
                v = (
                    jnp.where(live, v_pool[page_ids].reshape(bk, kh, dv), 0)
                    .astype(jnp.float32)
                    .transpose(1, 0, 2)
                )
            visible = key <= position
            if sliding_window is not None:
                visible &= key > position - sliding_window
            scores = jnp.where(visible, jnp.matmul(q_tile, k), -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            shift = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(scores - shift)
            keep = jnp.exp(top - shift)
            return (
                new_top,
                total * keep + jnp.sum(weights, -1, keepdims=True),
                acc * keep + jnp.matmul(weights, v),
            )

        shape = (kh, group * bq, 1)
        top = jnp.full(shape, -jnp.inf, jnp.float32) if sink is None else sink
        total = jnp.full(shape, 0.0 if sink is None else 1.0, jnp.float32)
        last = jnp.minimum(first + bq, kv_len)  # keys past the tile's last live row are not read
        begin = 0 if sliding_window is None else jnp.maximum(first - sliding_window + 1, 0) // bk
        _, total, acc = lax.fori_loop(
            begin,
            (last + bk - 1) // bk,
            step,
            (top, total, jnp.zeros((kh, group * bq, dv), jnp.float32)),
        )
        acc = (
            (acc / jnp.where(total > 0, total, 1)).reshape(kh, group, bq, dv).transpose(2, 0, 1, 3)
        )
        return lax.dynamic_update_slice(out, acc.astype(q.dtype), (start, 0, 0, 0))

    out = lax.fori_loop(0, tile_ends[-1], attend, jnp.zeros((t + bq, kh, group, dv), q.dtype))
    live_row = (seq_ids < block_tables.shape[0])[:, None, None]
    return jnp.where(live_row, out[:t].reshape(t, h, dv), 0)
