"""The lightning indexer's choice: score every visible entry with few cheap heads, keep the best k.

score(row, entry) = sum_h weight[row, h] * relu(q[row, h] . key[entry])    (DeepSeek-V3.2, eq. 1;
DeepSeek-V4, eq. 16). The cost grows with the context, but with index heads and index width only;
what it buys is that attention itself reads k entries.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..dispatch import dispatch

_Q_TILE = 32  # rows of one sequence scored together in a prefill step
_SEQ_TILE = 8  # sequences scored together in a decode step
_KEY_TILE = {"prefill": 1024, "decode": 4096}  # keys scored at a time


def index_topk(
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    pool: Float[Array, "N E D"],
    tables: Int[Array, "S P"],
    visible: Int[Array, " T"],
    q_starts: Int[Array, " S+1"],
    *,
    k: int,
    q_per_seq: int | None = None,
    key_scales: Float[Array, "N E"] | None = None,
    implementation: str | None = None,
) -> Int[Array, "T k"]:
    """The k best of the first `visible[t]` entries of each row's sequence, -1 past their number.

    Entry e of sequence s lies at `pool[tables[s, e // E], e % E]`; rows `q_starts[s] :
    q_starts[s + 1]` are sequence s, rows after them padding (their result is all -1 if their
    `visible` is 0, else undefined). Chosen entries come before the -1s, in no order that may be
    relied on; equal scores go to the lower entry. Scores are float32. q_per_seq: a decode step, in
    which row t belongs to sequence t // q_per_seq; None: a prefill step. key_scales: factors of
    quantised keys (positive). Raises ValueError on shapes that do not fit together.
    """
    (t, heads, width), (sequences, _) = q.shape, tables.shape
    if (
        weights.shape != (t, heads)
        or pool.shape[2:] != (width,)
        or visible.shape != (t,)
        or q_starts.shape != (sequences + 1,)
        or (q_per_seq is not None and t != sequences * q_per_seq)
        or (key_scales is not None and key_scales.shape != pool.shape[:2])
    ):
        raise ValueError(
            f"index_topk: q {q.shape}, weights {weights.shape}, pool {pool.shape}, tables"
            f" {tables.shape}, visible {visible.shape}, q_starts {q_starts.shape} and q_per_seq"
            f" {q_per_seq} do not fit together"
        )
    if k < 1:
        raise ValueError(f"index_topk: k must be >= 1, got {k}")
    return dispatch(
        "index_topk",
        q,
        weights,
        pool,
        tables,
        visible,
        q_starts,
        k=k,
        q_per_seq=q_per_seq,
        key_scales=key_scales,
        implementation=implementation,
    )


def index_topk_xla(
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    pool: Float[Array, "N E D"],
    tables: Int[Array, "S P"],
    visible: Int[Array, " T"],
    q_starts: Int[Array, " S+1"],
    *,
    k: int,
    q_per_seq: int | None = None,
    key_scales: Float[Array, "N E"] | None = None,
) -> Int[Array, "T k"]:
    """Tiles of live keys only; each tile's scores are merged into the k best so far. Where no row
    sees more than k entries, nothing is scored."""
    first = jnp.arange(k, dtype=jnp.int32)
    everything = jnp.where(first < visible[:, None], first, -1)
    entries = pool.shape[1]
    if tables.shape[1] * entries <= k:
        return everything
    keys = _KEY_TILE["prefill" if q_per_seq is None else "decode"]
    pages = max(1, min(keys // entries, tables.shape[1]))
    padded = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))

    def keys_of(rows: Int[Array, "W P"], tile: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Keys [W, pages * E, D] of one tile of each table row, and their scales."""
        ids = lax.dynamic_slice_in_dim(rows, tile * pages, pages, axis=1)
        keys = pool[ids].reshape(rows.shape[0], pages * entries, -1)
        scales = None if key_scales is None else key_scales[ids].reshape(keys.shape[:2])
        return keys, scales

    # no conditional: XLA copies the pools that its branches read. Loops of no turns cost nothing.
    needed = jnp.max(visible) > k
    seen = jnp.where(needed, visible, 0)
    if q_per_seq is None:
        live = jnp.where(needed, q_starts, 0)
        scored = _prefill(q, weights, seen, padded, live, keys_of, pages * entries, k)
    else:
        scored = _decode(q, weights, seen, padded, q_per_seq, keys_of, pages * entries, k)
    return jnp.where(needed, scored, everything)


def _prefill(
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    visible: Int[Array, " T"],
    tables: Int[Array, "S P"],
    q_starts: Int[Array, " S+1"],
    keys_of: Callable,
    tile: int,
    k: int,
) -> Int[Array, "T k"]:
    """A loop over live (sequence, row tile) items. Items come in row order and store whole tiles:
    rows past a tile's sequence are overwritten by the next item."""
    t, bq = q.shape[0], min(_Q_TILE, q.shape[0])
    q = jnp.pad(q, ((0, bq), (0, 0), (0, 0)))
    weights = jnp.pad(weights.astype(jnp.float32), ((0, bq), (0, 0)))
    lengths = q_starts[1:] - q_starts[:-1]
    ends = jnp.cumsum((lengths + bq - 1) // bq)
    items = jnp.arange(t // bq + tables.shape[0])
    sequence = jnp.searchsorted(ends, items, side="right", method="compare_all")
    seen = jnp.pad(visible, (0, bq))

    def one(item: jax.Array, out: jax.Array) -> jax.Array:
        s = sequence[item]
        at = q_starts[s] + (item - jnp.where(s > 0, ends[s - 1], 0)) * bq
        rows = lax.dynamic_slice_in_dim(q, at, bq)[None]
        w = lax.dynamic_slice_in_dim(weights, at, bq)[None]
        mine = at + jnp.arange(bq) < q_starts[s + 1]
        limit = jnp.where(mine, lax.dynamic_slice_in_dim(seen, at, bq), 0)[None]
        table = lax.dynamic_slice_in_dim(tables, s, 1)
        best = _best(rows, w, limit, lambda j: keys_of(table, j), tile, k)
        return lax.dynamic_update_slice_in_dim(out, best[0], at, 0)

    return lax.fori_loop(0, ends[-1], one, jnp.full((t + bq, k), -1, jnp.int32))[:t]


def _decode(
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    visible: Int[Array, " T"],
    tables: Int[Array, "S P"],
    q_per_seq: int,
    keys_of: Callable,
    tile: int,
    k: int,
) -> Int[Array, "T k"]:
    """Sequences sorted by length in chunks of `_SEQ_TILE`, each chunk a loop over the key tiles of
    its longest."""
    s, chunk = tables.shape[0], min(_SEQ_TILE, tables.shape[0])
    order = jnp.argsort(-visible.reshape(s, q_per_seq).max(1))
    pad = -s % chunk

    def arranged(x: jax.Array) -> jax.Array:
        x = x.reshape(s, q_per_seq, *x.shape[1:])[order]
        return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1)))

    rows, w, limits = arranged(q), arranged(weights.astype(jnp.float32)), arranged(visible)
    padded = jnp.pad(tables[order], ((0, pad), (0, 0)))

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        part = [lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (rows, w, limits, padded)]
        best = _best(*part[:3], lambda j: keys_of(part[3], j), tile, k)
        return lax.dynamic_update_slice_in_dim(out, best, i * chunk, 0)

    live = (jnp.sum(limits.max(1) > 0) + chunk - 1) // chunk
    out = lax.fori_loop(0, live, one, jnp.full((s + pad, q_per_seq, k), -1, jnp.int32))[:s]
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(s * q_per_seq, k)


def _best(
    q: Float[Array, "W R H D"],
    weights: Float[Array, "W R H"],
    visible: Int[Array, "W R"],
    load: Callable,
    tile: int,
    k: int,
) -> Int[Array, "W R k"]:
    """The k best of each row's first `visible` entries; load(j) gives tile j of the W sequences'
    keys."""

    def step(j: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        keys, scales = load(j)
        dots = jnp.einsum(
            "wrhd,wkd->wrhk", q, keys.astype(q.dtype), preferred_element_type=jnp.float32
        )
        scores = jnp.sum(jax.nn.relu(dots) * weights[..., None], axis=2)
        scores = scores if scales is None else scores * scales[:, None, :]
        entry = j * tile + jnp.arange(tile, dtype=jnp.int32)
        scores = jnp.where(entry < visible[..., None], scores, -jnp.inf)
        # the best so far are the lower entries: in front, they win ties
        merged = jnp.concatenate([best[0], scores], axis=-1)
        entries = jnp.concatenate([best[1], jnp.broadcast_to(entry, scores.shape)], axis=-1)
        values, places = lax.top_k(merged, k)
        return values, jnp.take_along_axis(entries, places, axis=-1)

    start = (
        jnp.full((*visible.shape, k), -jnp.inf, jnp.float32),
        jnp.full((*visible.shape, k), -1, jnp.int32),
    )
    values, entries = lax.fori_loop(0, (jnp.max(visible) + tile - 1) // tile, step, start)
    return jnp.where(values == -jnp.inf, -1, entries)
