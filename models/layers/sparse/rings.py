"""Per-sequence rings: the newest rows of a sequence, at their position modulo the ring's length.

Because a row's place follows from its position alone, nothing has to be counted or cleared: a
sequence that starts over, or goes back a few tokens, overwrites what it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepinfer_jax.models.base import StepBatch


@dataclass(frozen=True)
class StepRows:
    """What the layers of one step share: where each sequence's rows begin, in rows and in
    positions."""

    batch: StepBatch

    @cached_property
    def counts(self) -> Int[Array, " S"]:
        """Rows of each sequence in this step; 0 for padding sequences."""
        starts = self.batch.q_starts
        return jnp.where(self.batch.kv_lens > 0, starts[1:] - starts[:-1], 0)

    @cached_property
    def first(self) -> Int[Array, " S"]:
        """Position of each sequence's first row of this step: as many rows came before."""
        return self.batch.kv_lens - self.counts

    @cached_property
    def sequences(self) -> Int[Array, " T"]:
        """The sequence of each row, S - 1 in padding rows."""
        return jnp.minimum(self.batch.seq_ids, self.batch.kv_lens.shape[0] - 1)

    def row_of(
        self, sequences: Int[Array, " N"], positions: Int[Array, "N K"]
    ) -> tuple[Int[Array, "N K"], jax.Array]:
        """Rows of this step that hold `positions`, and whether they do: false for earlier ones."""
        offset = positions - self.first[sequences][:, None]
        rows = self.batch.q_starts[sequences][:, None] + offset
        return jnp.clip(rows, 0, self.batch.tokens.shape[0] - 1), offset >= 0

    def entry_tables(self, ratio: int) -> Int[Array, "S Q"]:
        """Tables of a paged cache with an entry per `ratio` tokens: entry e of sequence s lies in
        block tables[s, e // E], E entries per block. Where an entry spans several blocks it lies in
        the last of them: a block never depends on tokens after its own."""
        spanned = max(1, ratio // self.batch.block_size)
        return self.batch.block_tables[:, spanned - 1 :: spanned]

    def tail_slots(self, tail: int) -> Int[Array, " T"]:
        """Where each row lies in a pool of every block's last `tail` tokens; past its end for rows
        that are none of them."""
        size = self.batch.block_size
        place = self.batch.write_slots % size - (size - tail)
        slots = self.batch.write_slots // size * tail + place
        return jnp.where(place >= 0, slots, jnp.iinfo(jnp.int32).max)

    def read_tail(
        self,
        pool: Float[Array, "N E D"],
        sequences: Int[Array, " N"],
        positions: Int[Array, "N K"],
    ) -> Float[Array, "N K D"]:
        """Rows of `positions` among their blocks' last E tokens (of others: anything)."""
        size, tail = self.batch.block_size, pool.shape[1]
        blocks = self.batch.block_tables[sequences[:, None], positions // size]
        return pool[blocks, jnp.maximum(positions % size - (size - tail), 0)]


def read_rows(
    rows: Float[Array, "T D"],
    ring: Float[Array, "slots L D"],
    step: StepRows,
    sequences: Int[Array, " N"],
    positions: Int[Array, "N K"],
) -> Float[Array, "N K D"]:
    """The rows of `positions` (at most L back from the newest, negative ones give anything finite
    or not), from this step where it has them, else from the ring as it was before this step."""
    at, here = step.row_of(sequences, positions)
    slots = step.batch.state_slots[sequences][:, None]
    before = ring[slots, positions % ring.shape[1]]
    return jnp.where(here[..., None], rows[at], before.astype(rows.dtype))


def write_ring(
    ring: Float[Array, "slots L D"], rows: Float[Array, "T D"], step: StepRows
) -> Float[Array, "slots L D"]:
    """The ring with each sequence's newest rows of this step."""
    batch, length = step.batch, ring.shape[1]
    newest = batch.positions >= batch.kv_lens[step.sequences] - length
    slots = batch.state_slots[step.sequences]
    slots = jnp.where(batch.valid & newest, slots, ring.shape[0])
    return ring.at[slots, batch.positions % length].set(rows.astype(ring.dtype), mode="drop")
