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

from deepinfer_jax.models.base import PagedCache, ParallelAxes, StateCache
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
    projected rows is so much longer than what the newest entry is made of."""

    ratio: int
    head_dim: int
    overlap: bool
    rope: RopeConfig
    norm_eps: float
    rollback: int

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def width(self) -> int:
        """Values a token projects to, and as many gates."""
        return self.head_dim * (2 if self.overlap else 1)

    def paged(self, name: str, layers: int, dtype: jnp.dtype) -> PagedCache:
        """The entries, one per `ratio` tokens."""
        return PagedCache(name, layers, (self.head_dim,), jnp.dtype(dtype), stride=self.ratio)

    def state(self, name: str, layers: int, dtype: jnp.dtype) -> StateCache:
        """The ring of projected rows: values, then gates."""
        shape = (self.span + self.rollback, 2 * self.width)
        return StateCache(name, layers, shape, jnp.dtype(dtype))


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
        pool: Float[Array, "N E D"],
        ring: Float[Array, "slots L C"],
        step: StepRows,
        tables: Int[Array, "S P"],
    ) -> tuple[Float[Array, "N E D"], Float[Array, "slots L C"]]:
        """tables: `entry_tables` of the batch. Returns (pool with the new entries, ring with the
        new rows)."""
        rows = self.kv_gate(x)
        sequences, entries, count = finished_entries(step, self.config.ratio)
        tile = min(_ENTRY_TILE, sequences.shape[0])
        pad = -sequences.shape[0] % tile
        sequences, entries = jnp.pad(sequences, (0, pad)), jnp.pad(entries, (0, pad))
        size = pool.shape[1]

        def some(i: jax.Array, flat: jax.Array) -> jax.Array:
            mine = lax.dynamic_slice_in_dim(sequences, i * tile, tile)
            entry = lax.dynamic_slice_in_dim(entries, i * tile, tile)
            made = self._entries(rows, ring, step, mine, entry)
            place = tables[mine, entry // size] * size + entry % size
            live = i * tile + jnp.arange(tile) < count
            place = jnp.where(live, place, flat.shape[0])
            return flat.at[place].set(made.astype(flat.dtype), mode="drop")

        flat = pool.reshape(-1, pool.shape[-1])
        flat = lax.fori_loop(0, (count + tile - 1) // tile, some, flat)
        return flat.reshape(pool.shape), write_ring(ring, rows, step)

    def _entries(
        self,
        rows: Float[Array, "T C"],
        ring: Float[Array, "slots L C"],
        step: StepRows,
        sequences: Int[Array, " M"],
        entries: Int[Array, " M"],
    ) -> Float[Array, "M D"]:
        """Entries of the given sequences, normalised and rotated to their window's first token."""
        c = self.config
        start = entries * c.ratio
        offset = jnp.arange(c.span, dtype=jnp.int32) - (c.span - c.ratio)
        positions = start[:, None] + offset
        values, gates = jnp.split(
            read_rows(rows, ring, step, sequences, jnp.maximum(positions, 0)), 2, axis=-1
        )
        gates = gates.astype(jnp.float32) + self.position_bias[...][offset % c.ratio]
        if c.overlap:  # first halves of the window before, second halves of the entry's own
            values, gates = (
                jnp.concatenate([a[:, : c.ratio, : c.head_dim], a[:, c.ratio :, c.head_dim :]], 1)
                for a in (values, gates)
            )
        real = (positions >= 0)[..., None]
        weights = jax.nn.softmax(jnp.where(real, gates, -jnp.inf), axis=1)
        mean = jnp.sum(jnp.where(real, values.astype(jnp.float32), 0) * weights, axis=1)
        normed = self.norm(mean.astype(rows.dtype))
        return rotate_tail(normed[:, None], *rope_cos_sin(c.rope, start))[:, 0]


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


def entry_tables(block_tables: Int[Array, "S P"], block_size: int, ratio: int) -> Int[Array, "S Q"]:
    """Tables of a paged cache with an entry per `ratio` tokens: entry e of sequence s lies in block
    tables[s, e // E], E entries per block. Where an entry spans several blocks it lies in the last
    of them: a block never depends on tokens after its own."""
    return block_tables[:, max(1, ratio // block_size) - 1 :: max(1, ratio // block_size)]
