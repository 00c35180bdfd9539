"""What an engine's KV blocks and state rows are: their shapes, how tensor parallelism splits them,
and how payloads are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from deepinfer_jax.models.base import CacheSpec, PagedCache, ParallelAxes

KINDS = ("blocks", "states")


class BlockLayout:
    """kind is "blocks" (paged caches) or "states" (per-sequence caches); cut is how many pieces a
    payload's split dimension is cut into on each tensor-parallel device (see block_mover.py).

    stacked: a payload's arrays are [size, layers, *entry], one per cache (fewest arrays, contiguous
    rows: for CPUs); otherwise [size, *entry], one per layer (no second copy in XLA's gathers: for
    GPUs)."""

    def __init__(
        self, specs: Iterable[CacheSpec], axes: ParallelAxes, block_size: int, stacked: bool
    ) -> None:
        self.axes, self.block_size, self.stacked = axes, block_size, stacked
        specs = tuple(specs)
        self.specs: dict[str, tuple[CacheSpec, ...]] = {
            "blocks": tuple(s for s in specs if isinstance(s, PagedCache)),
            "states": tuple(s for s in specs if not isinstance(s, PagedCache)),
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds this model has."""
        return tuple(k for k in KINDS if self.specs[k])

    def describe(self) -> dict[str, Any]:
        """What one block and one state row are, independent of mesh and tp: plain values, equal iff
        contents can be exchanged."""
        return {
            "block_size": self.block_size,
            "caches": [
                {
                    "name": s.name,
                    "kind": kind,
                    "layers": s.layers,
                    "entry": list(self._entry(kind, s)),
                    "dtype": np.dtype(s.dtype).name,
                }
                for kind in self.kinds
                for s in self.specs[kind]
            ],
        }

    def block_bytes(self, kind: str = "blocks") -> int:
        """Bytes of one block (or state row) over all layers and caches, one copy."""
        return sum(
            s.layers * math.prod(self._entry(kind, s)) * np.dtype(s.dtype).itemsize
            for s in self.specs[kind]
        )

    def row_shapes(self, kind: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{cache: ((layers, *entry), dtype)}: one block or state row, as
        `BlockMover.to_host` gives it."""
        return {
            s.name: ((s.layers, *self._entry(kind, s)), np.dtype(s.dtype)) for s in self.specs[kind]
        }

    def shard_shape(self, kind: str, spec: CacheSpec, size: int) -> tuple[int, ...]:
        """Shape of one device's array of a payload whose bucket is `size`, uncut."""
        return self.piece_shape(kind, spec, size, self.axes.tp if spec.tp_dim is not None else 1)

    def piece_shape(self, kind: str, spec: CacheSpec, size: int, parts: int) -> tuple[int, ...]:
        """Of a payload's array, with the dimension that tp splits divided by `parts`."""
        shape = [size, *[spec.layers] * self.stacked, *self._entry(kind, spec)]
        if spec.tp_dim is not None:
            shape[self.split_dim(kind, spec)] //= parts
        return tuple(shape)

    def _entry(self, kind: str, spec: CacheSpec) -> tuple[int, ...]:
        if isinstance(spec, PagedCache):
            return (spec.entries_per_block(self.block_size), *spec.entry_shape)
        return tuple(spec.shape)

    def split_dim(self, kind: str, spec: CacheSpec) -> int:
        """Dimension of a payload's array that tp splits, of a cache that it does split."""
        assert spec.tp_dim is not None, spec
        return spec.tp_dim + (2 if kind == "blocks" else 1) + self.stacked

    def num_arrays(self, spec: CacheSpec) -> int:
        """Arrays of a cache in a payload, per device and piece."""
        return 1 if self.stacked else spec.layers

    def num_pieces(self, spec: CacheSpec, cut: int) -> int:
        return 1 if spec.tp_dim is None else cut

    def payload_spec(self, kind: str, spec: CacheSpec) -> P:
        """How a payload's piece over all ranks is sharded."""
        dims: list[str | None] = [None] * (len(self._entry(kind, spec)) + self.stacked)
        if spec.tp_dim is not None and self.axes.tp > 1:
            dims[self.split_dim(kind, spec) - 1] = self.axes.tp_axis
        return P(self.axes.dp_axes, *dims)

    def check_cut(self, cut: int) -> None:
        """Raises ValueError naming a cache that cannot be cut."""
        for kind in self.kinds:
            for spec in self.specs[kind]:
                if spec.tp_dim is None:
                    continue
                width = (spec.entry_shape if isinstance(spec, PagedCache) else spec.shape)[
                    spec.tp_dim
                ]
                if width % (self.axes.tp * cut):
                    raise ValueError(
                        f"cache {spec.name!r}: dimension of {width} cannot be cut into"
                        f" {self.axes.tp * cut} pieces"
                    )
