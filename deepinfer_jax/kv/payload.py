"""Blocks on their way: what a `BlockMover` gathers, sends and scatters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Payload:
    """`count` blocks (or state rows) of every cache of a kind, on the devices of one DP rank, in a
    bucket of `size`.

    pieces[cache][i][t] is the tuple of one-device arrays on tensor-parallel device t, the split
    dimension cut into equal pieces (one, unless the two sides' tp differ): on GPUs [size, *entry]
    of layer i, on CPUs one [size, layers, *entry] (i = 0). Rows from `count` on are undefined.
    """

    kind: str
    rank: int  # local rank whose devices hold it
    count: int
    size: int
    pieces: dict[str, tuple[tuple[tuple[jax.Array, ...], ...], ...]]

    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(self.pieces)

    def ready(self) -> bool:
        """All bytes have arrived; waits for nothing."""
        return all(x.is_ready() for x in self.arrays())  # type: ignore[attr-defined]

    def wait(self) -> None:
        jax.block_until_ready(self.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of the valid rows, copies on replicated devices included."""
        return sum(x.nbytes for x in self.arrays()) * self.count // self.size


@dataclass(frozen=True)
class BorrowedPayload(Payload):
    """Lies on CPU devices of this process other than those it is for, which read it there: memory
    is one, arrays are immutable and kept alive by whoever reads them."""


def assign(
    layer: tuple[tuple[jax.Array, ...], ...], tp: int, split: bool
) -> tuple[tuple[jax.Array, ...], ...]:
    """Which pieces each of `tp` receiving devices gets, from those of the sending devices."""
    if not split:
        return tuple(layer[t % len(layer)] for t in range(tp))
    pieces = [p for device in layer for p in device]
    if len(pieces) % tp:
        raise ValueError(
            f"{len(pieces)} pieces cannot be shared by {tp} devices: gather with"
            f" cut=prepare_for({tp})"
        )
    each = len(pieces) // tp
    return tuple(tuple(pieces[t * each : (t + 1) * each]) for t in range(tp))


def cut_of(payload: Payload) -> int:
    """Pieces per device of the caches that tp splits."""
    return max(len(layers[0][0]) for layers in payload.pieces.values())


def has_own_memory(payload: Payload) -> bool:
    """Whether its devices have memory that others cannot read."""
    (first, *_), *_ = next(iter(payload.pieces.values()))[0]
    return next(iter(first.devices())).platform != "cpu"


def leaves_of(pieces: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """(tensor-parallel device's number, leaf), in the order of `refill`."""
    return (
        (t, p)
        for layers in pieces.values()
        for layer in layers
        for t, pieces in enumerate(layer)
        for p in pieces
    )


def refill(pieces: dict[str, Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """The same nest with other leaves."""
    it = iter(leaves)
    return {
        n: tuple(tuple(tuple(next(it) for _ in p) for p in layer) for layer in layers)
        for n, layers in pieces.items()
    }
