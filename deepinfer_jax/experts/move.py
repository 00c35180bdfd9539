"""Experts moved between the slots of one layer, on the device, in one program per kind of layer.

The program takes the layer's arrays, gives them back rearranged (the buffers are donated) and makes
the placement tables that belong to them, so weights and tables change hands together. Which expert
goes where is data: no rearrangement compiles anything.

Between ranks experts travel by all-to-all, at most one expert for each pair of ranks at a time, as
often as the busiest pair needs it, and in pieces, so that the memory of it stays below that of the
layer's own experts (`PIECE_SHARE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.placement import make_placement
from deepinfer_jax.runner.packing import PackedLayout

PIECE_SHARE = 0.5
"""Buffers of a move, as a share of the array that is moved."""


@dataclass(frozen=True)
class MovePlan:
    """What each new slot is filled from. source [P]: the old slot; turn [P]: the exchange it
    travels in, 0 for what stays in its rank; turns: how many exchanges there are."""

    source: Int[np.ndarray, " physical"]
    turn: Int[np.ndarray, " physical"]
    turns: int

    @property
    def moved(self) -> int:
        """Slots whose expert changes."""
        return int((self.source != np.arange(self.source.size)).sum())


def plan_moves(
    old: Int[np.ndarray, " physical"], new: Int[np.ndarray, " physical"], ranks: int
) -> MovePlan:
    """Sources for new[p], the expert slot p is to hold, out of old[p]. An expert comes from its own
    slot, else its own rank, else the rank that sends this one the least so far."""
    share = old.size // ranks
    source, turn = np.arange(old.size), np.zeros(old.size, np.int64)
    sent = np.zeros((ranks, ranks), np.int64)  # [from, to]
    for slot in np.flatnonzero(old != new):
        rank, holders = slot // share, np.flatnonzero(old == new[slot])
        if not holders.size:
            raise ValueError(f"expert {new[slot]} has no slot to be moved from")
        homes = holders // share
        near = holders[homes == rank]
        if near.size:
            source[slot] = near[0]
            continue
        at = (sent[homes, rank] * old.size + sent[homes].sum(1)).argmin()
        source[slot], turn[slot] = holders[at], sent[homes[at], rank]
        sent[homes[at], rank] += 1
    return MovePlan(source.astype(np.int32), turn.astype(np.int32), int(sent.max()))


def move_layout(num_experts: int, num_physical: int) -> PackedLayout:
    """Inputs of a move: the plan and the tables of the new placement, as one array."""
    i32 = np.int32
    return PackedLayout(
        {
            "source": ((num_physical,), i32),
            "turn": ((num_physical,), i32),
            "turns": ((), i32),
            "physical_to_logical": ((num_physical,), i32),
            "logical_to_physical": ((num_experts, num_physical - num_experts + 1), i32),
            "replica_count": ((num_experts,), i32),
        }
    )


def pack_move(
    plan: MovePlan, new: Int[np.ndarray, " physical"], num_experts: int
) -> Int[np.ndarray, " packed"]:
    """The packed inputs of a move to the slots `new`. ValueError when an expert would lose its last
    slot."""
    tables, layout = make_placement(new, num_experts), move_layout(num_experts, new.size)
    row = np.zeros(layout.size, np.int32)
    for name, values in {**vars(plan), **vars(tables)}.items():
        layout.view(row, name)[...] = values
    return row


def move_program(
    shapes: Sequence[jax.ShapeDtypeStruct],
    specs: Sequence[P],
    num_experts: int,
    mesh: Mesh,
    axes: ParallelAxes,
) -> Callable:
    """The jitted program of a kind of layer: (arrays, packed) -> (arrays, tables), arrays donated.

    shapes, specs: of the layer's arrays, slots first.
    """
    layout = move_layout(num_experts, shapes[0].shape[0])

    def move(arrays: tuple[Array, ...], packed: Array) -> tuple[tuple[Array, ...], ...]:
        inputs = layout.unpack(packed)
        route = _Route.of(inputs, axes)
        tables = tuple(inputs[t] for t in ("physical_to_logical", "logical_to_physical"))
        return tuple(route.rearrange(a) for a in arrays), (*tables, inputs["replica_count"])

    mapped = jax.shard_map(
        move,
        mesh=mesh,
        in_specs=(tuple(specs), P()),
        out_specs=(tuple(specs), (P(), P(), P())),
        check_vma=False,
    )
    mapped.__name__ = "move_experts"
    return jax.jit(mapped, donate_argnums=0)


@dataclass(frozen=True)
class _Route:
    """A plan as one rank sees it; n slots per rank.

    source i32 [ranks, n] local slot in the rank `origin` i32 [ranks, n] that holds it; turn i32
    [ranks, n]; turns i32.
    """

    source: Array
    origin: Array
    turn: Array
    turns: Array
    axes: ParallelAxes

    @classmethod
    def of(cls, inputs: dict[str, Array], axes: ParallelAxes) -> _Route:
        source = inputs["source"].reshape(axes.ep, -1)
        share = source.shape[1]
        turn = inputs["turn"].reshape(axes.ep, -1)
        return cls(source % share, source // share, turn, inputs["turns"], axes)

    def rearrange(self, array: Array) -> Array:
        """array [n, ...]: this rank's slots, old content -> new content, in pieces of its second
        dimension, in place."""
        if array.ndim == 1:
            return self.rearrange(array[:, None])[:, 0]
        rows = piece_rows(array.shape, self.axes.ep)

        def piece(i: Array, array: Array) -> Array:
            block = jax.lax.dynamic_slice_in_dim(array, i * rows, rows, 1)
            return jax.lax.dynamic_update_slice_in_dim(array, self._exchange(block), i * rows, 1)

        return jax.lax.fori_loop(0, array.shape[1] // rows, piece, array)

    def _exchange(self, block: Array) -> Array:
        me = jax.lax.axis_index(self.axes.ep_axis)
        every = jnp.arange(self.axes.ep)
        fresh = block[self.source[me]]  # right where the source is here
        if self.axes.ep == 1:
            return fresh

        def exchange(turn: Array, fresh: Array) -> Array:
            asked = (self.turn == turn) & (self.origin == me)
            outgoing = block[self.source[every, asked.argmax(1)]]  # where nothing is asked: unread
            received = jax.lax.all_to_all(outgoing, self.axes.ep_axis, 0, 0, tiled=True)
            arrives = (self.turn[me] == turn) & (self.origin[me] != me)
            arrives = arrives.reshape(-1, *(1,) * (block.ndim - 1))
            return jnp.where(arrives, received[self.origin[me]], fresh)

        return jax.lax.fori_loop(0, self.turns, exchange, fresh)


def piece_rows(shape: tuple[int, ...], ranks: int) -> int:
    """Rows of the second dimension moved at once, a divisor of it: a piece of the slots comes and
    goes, and so does one expert's for each rank."""
    slots, rows = shape[:2]
    most = max(1, math.floor(PIECE_SHARE * slots * rows / (2 * slots + 2 * ranks)))
    return max(d for d in range(1, min(most, rows) + 1) if rows % d == 0)
