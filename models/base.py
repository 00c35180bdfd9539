"""What every model and the engine agree on: cache declarations, the batch a forward pass sees, mesh
axes.

Everything here is the *local view of one DP rank*: the step functions run inside `jax.shard_map`,
so a model never sees the data-parallel dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class PagedCache:
    """A cache indexed by block, one entry per `stride` tokens: each layer is an array `[num_blocks,
    entries_per_block(block_size), *entry_shape]`.

    tp_dim: which dimension of entry_shape is split over the `tp` mesh axis (None: replicated).
    tail: 0, or of how many of a block's tokens, the last ones, there are entries.
    """

    name: str
    layers: int
    entry_shape: tuple[int, ...]
    dtype: jnp.dtype
    tp_dim: int | None = None
    stride: int = 1
    tail: int = 0

    def entries_per_block(self, block_size: int) -> int:
        """How many entries lie in a block of `block_size` tokens; where an entry spans several
        blocks, one of them holds it and the others leave their place empty.

        Raises ValueError where neither size is a multiple of the other.
        """
        if block_size % self.stride and self.stride % block_size:
            raise ValueError(
                f"block_size {block_size} does not fit cache {self.name!r}, which has an entry per"
                f" {self.stride} tokens: one must be a multiple of the other"
            )
        entries = max(1, block_size // self.stride)
        return min(self.tail, entries) if self.tail else entries


@dataclass(frozen=True)
class StateCache:
    """A per-sequence cache indexed by slot: each layer is an array `[num_slots, *shape]` (rings,
    compressor state).

    restart: a sequence whose earlier tokens are in blocks may start without a row of its own at
    positions that are multiples of this; 0: at none.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: jnp.dtype
    tp_dim: int | None = None
    restart: int = 0


CacheSpec = PagedCache | StateCache


def restart_positions(specs: Iterable[CacheSpec]) -> int:
    """A sequence whose earlier tokens are in blocks may start at multiples of this; 0: at none,
    since some state is kept per sequence only."""
    return math.lcm(*(s.restart for s in specs if isinstance(s, StateCache)))


Caches = dict[str, tuple[jax.Array, ...]]
"""Cache name -> one array per layer, in the layer order of its spec."""


@dataclass(frozen=True)
class KeyCost:
    """What one query row pays per key of one kind, over all layers: FLOPs (2 per multiply-add) and
    bytes read from caches.

    stride: tokens per key. most: keys a row reads, None for all it sees. beyond: while a row sees
    no more keys than this, none are read.
    """

    flops: float
    bytes: float
    stride: int = 1
    most: int | None = None
    beyond: int = 0

    def keys(self, context: float) -> float:
        """Keys that a row with `context` tokens before it, itself included, reads."""
        seen = context / self.stride
        if seen <= self.beyond:
            return 0.0
        return seen if self.most is None else min(seen, float(self.most))


@dataclass(frozen=True)
class ParallelAxes:
    """Mesh axes as a model sees them from inside `jax.shard_map`; the mesh is (replica, ep, tp) and
    dp = replica * ep.

    A size of 1 means: the axis exists in the mesh and collectives over it are no-ops that may be
    skipped.
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1
    replica_axis: str = "replica"
    ep_axis: str = "ep"
    tp_axis: str = "tp"

    def __post_init__(self) -> None:
        if self.dp < 1 or self.ep < 1 or self.tp < 1:
            raise ValueError(
                f"dp, ep and tp must be >= 1, got dp={self.dp} ep={self.ep} tp={self.tp}"
            )
        if self.dp % self.ep:
            raise ValueError(
                f"ep must divide dp (experts are laid over the attention ranks), got dp={self.dp}"
                f" ep={self.ep}"
            )

    @property
    def dp_axes(self) -> tuple[str, str]:
        return (self.replica_axis, self.ep_axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step on one rank: T packed rows of S sequences, whose block tables hold P
    pages.

    Prefill: the rows of sequence s are `q_starts[s]:q_starts[s+1]`; rows from `q_starts[S]` on are
    padding. Decode:  row i belongs to sequence i // q_per_seq (T == S * q_per_seq); a padding
    sequence has kv_lens 0. The model first writes this step's keys and values at `write_slots`,
    then attends to `kv_lens` keys per sequence; row j (0-based) of a sequence with q rows sits at
    position `kv_lens - q + j` and sees keys up to itself.
    """

    tokens: jax.Array  # i32 [T]
    positions: jax.Array  # i32 [T]; 0 in padding rows
    write_slots: (
        jax.Array
    )  # i32 [T]; block * block_size + offset; >= num_blocks * block_size in padding rows (dropped)
    # i32 [S, P]; entries past a sequence's pages are any valid block id, never read into a result
    block_tables: jax.Array
    kv_lens: (
        jax.Array
    )  # i32 [S]; keys per sequence once this step's rows are written; 0: padding sequence
    q_starts: jax.Array  # i32 [S + 1]
    seq_ids: jax.Array  # i32 [T]; S in padding rows
    state_slots: jax.Array  # i32 [S]; row of each StateCache; 0 in padding sequences
    is_decode: bool = field(default=False, metadata={"static": True})
    q_per_seq: int = field(default=1, metadata={"static": True})
    block_size: int = field(default=0, metadata={"static": True})  # 0: not told

    @property
    def valid(self) -> jax.Array:
        """bool [T]: rows that are not padding."""
        return self.seq_ids < self.kv_lens.shape[0]

    @property
    def visible(self) -> jax.Array:
        """i32 [T]: keys each row sees, itself included; 0 in padding rows."""
        return jnp.where(self.valid, self.positions + 1, 0)
