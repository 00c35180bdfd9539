"""Compressed keys of DeepSeek-V4 (technical report, section 2.3): every `ratio` tokens one entry, a
softmax-weighted mean of what the tokens of its window project to.

Without overlap (HCA, eqs. 20-23) entry w is made of the tokens of window w. With overlap (CSA,
eqs. 9-12) each token projects to two halves, and entry w is made of window w - 1's first halves and
window w's second halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from deepinfer_jax.kernels_pallas import kv_write
from deepinfer_jax.kernels_pallas.kv_write import cast_to_cache
from deepinfer_jax.models.base import CacheSpec, PagedCache, ParallelAxes, StateCache
from deepinfer_jax.models.layers.linear import Linear
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.param import param
from deepinfer_jax.models.layers.rope import RopeConfig, rope_cos_sin
from deepinfer_jax.models.layers.sparse.rings import StepRows, read_rows, write_ring
from deepinfer_jax.models.layers.sparse.tail_rope import rotate_tail

_ENTRY_TILE = 32  # entries made at a time


@dataclass(frozen=True)
class CompressorConfig:
    """ratio: tokens per entry. rollback: how many tokens a sequence may be taken back: the ring of
    projected rows is so much longer than what the newest entry is made of.

    paged: where an entry begins with a block, what it needs of the window before lies in pages, so
    that a sequence may start there with no ring of its own.
    """

    ratio: int
    head_dim: int
    overlap: bool
    rope: RopeConfig
    norm_eps: float
    rollback: int
    paged: bool = False

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def width(self) -> int:
        """Values a token projects to, and as many gates."""
        return self.head_dim * (2 if self.overlap else 1)

    @property
    def has_tail(self) -> bool:
        return self.paged and self.overlap

    def caches(
        self, name: str, layers: int, dtype: jnp.dtype, wide: jnp.dtype
    ) -> tuple[CacheSpec, ...]:
        """`name`: the entries. `name`_rows: the ring of projected rows (values, then gates), in
        `wide`. `name`_tail, where `has_tail`: first halves of each block's last `ratio` rows."""
        ring = (self.span + self.rollback, 2 * self.width)
        restart = self.ratio if self.paged else 0
        specs = [
            PagedCache(name, layers, (self.head_dim,), jnp.dtype(dtype), stride=self.ratio),
            StateCache(f"{name}_rows", layers, ring, jnp.dtype(wide), restart=restart),
        ]
        if self.has_tail:
            halves = (2 * self.head_dim,)
            specs.append(
                PagedCache(f"{name}_tail", layers, halves, jnp.dtype(wide), tail=self.ratio)
            )
        return tuple(specs)

    def cache_names(self, name: str) -> tuple[str, ...]:
        return tuple(s.name for s in self.caches(name, 1, jnp.float32, jnp.float32))


class Compressor(nnx.Module):
    """Makes the entries whose last token is in this step, wherever their first one was."""

    def __init__(
        self, hidden: int, config: CompressorConfig, *, dtype: jnp.dtype, axes: ParallelAxes
    ) -> None:
        c = config
        self.config = c
        # never quantised: an entry stands for many tokens, and checkpoints keep these in bfloat16
        self.kv_gate = Linear(hidden, 2 * c.width, dtype=dtype, axes=axes)
        self.position_bias = param((c.ratio, c.width), jnp.float32, init="zeros")
        self.norm = RMSNorm(c.head_dim, c.norm_eps, dtype)

    def __call__(
        self,
        x: Float[Array, "T hidden"],
        caches: tuple[jax.Array, ...],
        step: StepRows,
    ) -> tuple[jax.Array, ...]:
        """caches: entries, ring and, where `has_tail`, tail of the layer. Returns them with this
        step's entries and rows."""
        c, (pool, ring) = self.config, caches[:2]
        rows = self.kv_gate(x)
        tables = step.entry_tables(c.ratio)
        tail = caches[2] if c.has_tail else None
        sequences, entries, count = finished_entries(step, c.ratio)
        tile = min(_ENTRY_TILE, sequences.shape[0])
        pad = -sequences.shape[0] % tile
        sequences, entries = jnp.pad(sequences, (0, pad)), jnp.pad(entries, (0, pad))
        size = pool.shape[1]

        def some(i: jax.Array, pool: jax.Array) -> jax.Array:
            mine = lax.dynamic_slice_in_dim(sequences, i * tile, tile)
            entry = lax.dynamic_slice_in_dim(entries, i * tile, tile)
            made = self._entries(rows, ring, tail, step, mine, entry)
            live = i * tile + jnp.arange(tile) < count
            block = jnp.where(live, tables[mine, entry // size], pool.shape[0])
            return pool.at[block, entry % size].set(cast_to_cache(made, pool.dtype), mode="drop")

        pool = lax.fori_loop(0, (count + tile - 1) // tile, some, pool)
        made = (pool, write_ring(ring, rows, step))
        return made if tail is None else (*made, self._write_tail(tail, rows, step))

    def _write_tail(
        self, tail: Float[Array, "N E C"], rows: Float[Array, "T C2"], step: StepRows
    ) -> Float[Array, "N E C"]:
        values, gates = jnp.split(rows, 2, axis=-1)
        d = self.config.head_dim
        halves = jnp.concatenate([values[:, :d], gates[:, :d]], axis=-1)
        return kv_write(tail, halves, step.tail_slots(tail.shape[1]))

    def _entries(
        self,
        rows: Float[Array, "T C"],
        ring: Float[Array, "slots L C"],
        tail: Float[Array, "N E C2"] | None,
        step: StepRows,
        sequences: Int[Array, " M"],
        entries: Int[Array, " M"],
    ) -> Float[Array, "M D"]:
        """Entries of the given sequences, normalised and rotated to their window's first token."""
        c, start = self.config, entries * self.config.ratio
        own = start[:, None] + jnp.arange(c.ratio, dtype=jnp.int32)
        values, gates = self._parts(read_rows(rows, ring, step, sequences, own))
        if c.overlap:
            before = own - c.ratio
            earlier = self._earlier(rows, ring, tail, step, sequences, jnp.maximum(before, 0))
            real = (before >= 0)[..., None]
            values = jnp.concatenate(
                [jnp.where(real, earlier[0], 0), values[..., c.head_dim :]], axis=1
            )
            gates = jnp.concatenate(
                [jnp.where(real, earlier[1], -jnp.inf), gates[..., c.head_dim :]], axis=1
            )
        mean = jnp.sum(values * jax.nn.softmax(gates, axis=1), axis=1)
        normed = self.norm(mean.astype(rows.dtype))
        return rotate_tail(normed[:, None], *rope_cos_sin(c.rope, start))[:, 0]

    def _parts(self, rows: Float[Array, "M r C"]) -> tuple[jax.Array, jax.Array]:
        """(values, gates with their position's bias) of whole windows, float32."""
        values, gates = jnp.split(rows.astype(jnp.float32), 2, axis=-1)
        return values, gates + self.position_bias[...]

    def _earlier(
        self,
        rows: Float[Array, "T C"],
        ring: Float[Array, "slots L C"],
        tail: Float[Array, "N E C2"] | None,
        step: StepRows,
        sequences: Int[Array, " M"],
        positions: Int[Array, "M r"],
    ) -> tuple[Float[Array, "M r D"], Float[Array, "M r D"]]:
        """First halves of the window before: values and gates. Where it ends with a block, earlier
        steps' rows come from pages, if there are any."""
        d = self.config.head_dim
        values, gates = self._parts(read_rows(rows, ring, step, sequences, positions))
        values, gates = values[..., :d], gates[..., :d]
        if tail is None:
            return values, gates
        stored = step.read_tail(tail, sequences, positions).astype(jnp.float32)
        _, here = step.row_of(sequences, positions)
        ends_block = (positions[:, -1:] + 1) % step.batch.block_size == 0
        paged = (~here & ends_block)[..., None]
        bias = self.position_bias[...][:, :d]
        return (
            jnp.where(paged, stored[..., :d], values),
            jnp.where(paged, stored[..., d:] + bias, gates),
        )


def finished_entries(
    step: StepRows, ratio: int
) -> tuple[Int[Array, " M"], Int[Array, " M"], jax.Array]:
    """Entries whose last token is a row of this step: (sequence, entry, how many there are)."""
    batch = step.batch
    done = batch.kv_lens // ratio
    ends = jnp.cumsum(done - step.first // ratio)
    t, s = batch.tokens.shape[0], batch.kv_lens.shape[0]
    item = jnp.arange(min(t, t // ratio + s), dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, s - 1)
    return sequence, done[sequence] - (ends[sequence] - item), ends[-1]
