"""Attention of each row to entries chosen for it: gathered, so that the cost grows with how many
are chosen and not with the context."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..dispatch import dispatch

_GATHER_BYTES = 32 << 20  # most bytes of gathered entries at a time
_ENTRY_TILE = 512  # entries per row and pass of the online softmax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeySource:
    """Entries that rows may attend to, in one pool: each is key and, its first values, value.

    Entry e of row t lies at `pool[tables[seq_ids[t], e // E], e % E]`, or, without tables, at
    `pool[e, 0]` (E is 1). Row t attends to `entries[t, : counts[t]]`, without `entries` to its
    first counts[t] entries. A pool may have a dimension of 1 before its last one.
    """

    pool: Float[Array, "N E *one D"]
    counts: Int[Array, " T"]
    entries: Int[Array, "T K"] | None = None  # -1 from counts on
    tables: Int[Array, "S P"] | None = None
    seq_ids: Int[Array, " T"] | None = None  # clipped to S - 1 in padding rows

    @property
    def width(self) -> int:
        """Most entries a row can attend to."""
        if self.entries is not None:
            return self.entries.shape[1]
        return self.tables.shape[1] * self.pool.shape[1]


def sparse_attention(
    q: Float[Array, "T H D"],
    sources: tuple[KeySource, ...],
    *,
    scale: float,
    v_dim: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H V"]:
    """One softmax per row and head over the row's entries of all sources -> [T, H, v_dim] in q's
    dtype; rows with no entry are zeros.

    All heads share an entry, whose first v_dim channels (None: all) are its value. sinks: a logit
    per head that takes part in the softmax's denominator only. Scores and sums are float32. Raises
    ValueError on shapes that do not fit together.
    """
    for source in sources:
        if (source.entries is None or source.seq_ids is not None) and source.tables is None:
            raise ValueError("sparse_attention: a source without entries needs tables")
        if source.tables is None and source.pool.shape[1] != 1:
            raise ValueError(
                f"sparse_attention: a pool {source.pool.shape} of pages needs tables and seq_ids"
            )
        if source.pool.shape[-1] != q.shape[2] or source.counts.shape != q.shape[:1]:
            raise ValueError(
                f"sparse_attention: q {q.shape} does not fit pool {source.pool.shape} and counts"
                f" {source.counts.shape}"
            )
    return dispatch(
        "sparse_attention",
        q,
        sources,
        scale=scale,
        v_dim=v_dim,
        sinks=sinks,
        implementation=implementation,
    )


def sparse_attention_xla(
    q: Float[Array, "T H D"],
    sources: tuple[KeySource, ...],
    *,
    scale: float,
    v_dim: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H V"]:
    """Row tiles, each an online softmax over passes of gathered entries; a tile makes as many
    passes as its fullest row needs."""
    t, heads, dim = q.shape
    v_dim = dim if v_dim is None else v_dim
    rows = _row_tile(t, sources, dim, q.dtype.itemsize)
    top = jnp.full((heads, 1), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)[:, None]
    total = jnp.full((heads, 1), 0.0 if sinks is None else 1.0, jnp.float32)

    def attend(at: jax.Array) -> Float[Array, "R H V"]:
        start = jnp.minimum(at, t - rows)  # the last tile overlaps the one before, to the same end
        q_tile = lax.dynamic_slice_in_dim(q, start, rows)
        carry = (
            jnp.broadcast_to(top, (rows, heads, 1)),
            jnp.broadcast_to(total, (rows, heads, 1)),
            jnp.zeros((rows, heads, v_dim), jnp.float32),
        )
        for source in sources:
            carry = _add(carry, q_tile, source, start, scale)
        _, summed, acc = carry
        return (acc / jnp.where(summed > 0, summed, 1)).astype(q.dtype)

    if rows == t:
        return attend(jnp.int32(0))

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            out, attend(i * rows), jnp.minimum(i * rows, t - rows), 0
        )

    return lax.fori_loop(0, -(-t // rows), one, jnp.zeros((t, heads, v_dim), q.dtype))


def _row_tile(t: int, sources: tuple[KeySource, ...], dim: int, itemsize: int) -> int:
    widest = max(min(_ENTRY_TILE, source.width) for source in sources)
    fitting = max(1, _GATHER_BYTES // (widest * dim * itemsize))
    return min(t, 1 << (fitting.bit_length() - 1))


def _add(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    q: Float[Array, "R H D"],
    source: KeySource,
    start: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The online softmax (largest score, sum, weighted values) of a row tile, with a source's
    entries added."""
    rows, tile = q.shape[0], min(_ENTRY_TILE, source.width)

    def mine(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, start, rows)

    counts = mine(source.counts)
    table = None if source.tables is None else source.tables[mine(source.seq_ids)]
    chosen = None
    if source.entries is not None:
        chosen = jnp.pad(mine(source.entries), ((0, 0), (0, -source.width % tile)))

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        place = j * tile + jnp.arange(tile, dtype=jnp.int32)
        live = place < counts[:, None]
        if chosen is None:
            entry = jnp.where(live, place, 0)
        else:
            entry = jnp.where(live, lax.dynamic_slice_in_dim(chosen, j * tile, tile, axis=1), 0)
        keys = _gathered(source.pool, table, entry)
        # what lies where nothing was written may be NaN, and 0 * NaN is NaN
        keys = jnp.where(live[..., None], keys, 0).astype(q.dtype)
        scores = scale * jnp.einsum("rhd,rkd->rhk", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(live[:, None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights, keep = jnp.exp(scores - shift), jnp.exp(top - shift)
        values = jnp.einsum(
            "rhk,rkv->rhv",
            weights.astype(q.dtype),
            keys[..., : acc.shape[-1]],
            preferred_element_type=jnp.float32,
        )
        return new_top, total * keep + jnp.sum(weights, -1, keepdims=True), acc * keep + values

    return lax.fori_loop(0, (jnp.max(counts) + tile - 1) // tile, step, carry)


def _gathered(
    pool: Float[Array, "N E *one D"], table: Int[Array, "R P"] | None, entry: Int[Array, "R K"]
) -> Float[Array, "R K D"]:
    # by page and place: of a pool that was flattened first, XLA makes a copy
    if table is None:
        rows = pool[entry, 0]
    else:
        size = pool.shape[1]
        pages = jnp.take_along_axis(table, entry // size, axis=1)
        rows = pool[pages, entry % size]
    return rows.reshape(*entry.shape, pool.shape[-1])
