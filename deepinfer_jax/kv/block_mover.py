"""Moving KV blocks (and state rows) out of an engine's pools and into another's: the data plane of
hand-over and KV store.

A `BlockMover` belongs to one engine's runner and knows its declared caches, not the model:

    mover = BlockMover(runner)                             # registers its programs: warm-up
    compiles them
    for rank, payload in mover.gathers(per_rank_ids):      # enqueues, waits for nothing; payloads
    of <= max bucket blocks
        moved = target.receive(payload, rank)              # device to device, asynchronous; meshes,
        dp, ep and tp may differ
        ...
        if moved.ready():                                  # the bytes have arrived
            target.scatter([(moved, block_ids)])           # enqueues; the pools are donated and
            written in place

    arrays = mover.to_host(payload)                        # {cache: np [count, layers, *entry]},
    waits
    payload = mover.from_host(arrays, rank)                # the way back, on that rank's devices

`kind` is "blocks" (paged caches, ids are block ids) or "states" (per-sequence caches, ids are state
rows); ids are local to a rank. `describe()` says what a block is, for whoever stores or receives it
elsewhere (disagg/layout.py).

Order on the device is program order: a gather reads what every step enqueued before it has written,
and a step enqueued after it may overwrite the blocks. A payload is a copy, so pools and payload
never share memory.

Between meshes a payload travels device by device, so no transfer waits for its producer (a
resharding device_put would). When tp differs, the split dimension is cut into lcm(tp, tp') pieces
on the sending side: see `prepare_for`. Between CPU devices of one process nothing travels: the
receiving side reads the payload where it lies (`BorrowedPayload`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from deepinfer_jax.kv import host_memory
from deepinfer_jax.kv.block_layout import BlockLayout
from deepinfer_jax.kv.copy_programs import BlockPrograms
from deepinfer_jax.kv.payload import (
    BorrowedPayload,
    Payload,
    assign,
    cut_of,
    has_own_memory,
    leaves_of,
    refill,
)
from deepinfer_jax.models.base import Caches, CacheSpec
from deepinfer_jax.runner import kv_pools
from deepinfer_jax.runner.mesh import rank_spec

BUCKETS = (4, 16, 64)
"""Blocks per payload. Rows past `count` are neither read nor written on CPU; elsewhere they cost
bandwidth."""

CACHED_BYTES = 16 << 20
"""Of a payload on a CPU, at most (unless the smallest bucket is larger): it is read again soon,
from the last-level cache then."""


class BlockMover(BlockLayout):
    """Gathers, receives and scatters blocks of one engine. All calls but `to_host` only enqueue,
    except that `scatter` waits for a borrowed payload that is not ready.

    runner: a ModelRunner, or anything with its attributes cache_specs, caches, mesh, config,
    num_blocks, programs, placement. The caller serialises calls that touch the pools (gather,
    scatter) with the engine's steps; `receive` may run anywhere.
    """

    def __init__(self, runner: Any, buckets: Sequence[int] = BUCKETS) -> None:
        self._on_cpu = runner.mesh.devices.flat[0].platform == "cpu"
        super().__init__(
            runner.cache_specs, runner.config.axes, runner.config.block_size, stacked=self._on_cpu
        )
        self.runner = runner
        self.ranks = len(runner.placement.local_ranks)
        self._whole = (
            self.ranks == self.axes.dp
        )  # one process owns all ranks: the pools are used as they are
        self.mesh = runner.mesh if self._whole else _local_mesh(runner)
        self._devices = self.mesh.devices.reshape(self.ranks, self.axes.tp)
        self.buckets = self._fitting(buckets)
        self._programs = BlockPrograms(runner, self, self.mesh, self.ranks, self.buckets)
        if self._on_cpu:
            host_memory.keep_freed(CACHED_BYTES + 4096, 4 * CACHED_BYTES)
        self._cuts = {1}  # pieces per device that programs exist for
        self._dummies: dict[tuple[str, int, int], dict[str, Any]] = {}
        for kind in self.kinds:
            self._programs.register(kind, 1)

    def _fitting(self, buckets: Sequence[int]) -> tuple[int, ...]:
        first, *rest = sorted(buckets)
        most = max(self.block_bytes(kind) for kind in self.kinds)
        return (first, *(b for b in rest if not self._on_cpu or b * most <= CACHED_BYTES))

    def device_row(self, rank: int) -> list[jax.Device]:
        """The tensor-parallel devices of a local rank, in the order of a payload's pieces."""
        return list(self._devices[rank])

    def prepare_for(self, peer_tp: int) -> int:
        """Compiles, once, what a peer with another tp needs; returns `cut` for gather(). At
        connect, not in steady state."""
        cut = math.lcm(self.axes.tp, peer_tp) // self.axes.tp
        if cut not in self._cuts:
            self.check_cut(cut)
            self._cuts.add(cut)
            for kind in self.kinds:
                self._programs.compile(kind, cut)
        return cut

    # ---- device side -----------------------------------------------------------------------------

    def gather(
        self, per_rank_ids: Sequence[Sequence[int]], kind: str = "blocks", cut: int = 1
    ) -> list[list[Payload]]:
        """Copies blocks out of the pools. per_rank_ids: one list per local rank. Returns, per rank,
        payloads that hold its ids in order, each of at most the largest bucket. cut: pieces per
        device (see `prepare_for`)."""
        out: list[list[Payload]] = [[] for _ in per_rank_ids]
        for rank, payload in self.gathers(per_rank_ids, kind, cut):
            out[rank].append(payload)
        return out

    def gathers(
        self, per_rank_ids: Sequence[Sequence[int]], kind: str = "blocks", cut: int = 1
    ) -> Iterator[tuple[int, Payload]]:
        """gather() one by one, as (rank, payload): what is sent on at once is still in the cache
        when it is written."""
        if len(per_rank_ids) != self.ranks:
            raise ValueError(f"{len(per_rank_ids)} lists of {kind} for {self.ranks} local ranks")
        for at, size in self._buckets_for(max(map(len, per_rank_ids))):
            payloads = self._gather_round(
                [list(ids[at : at + size]) for ids in per_rank_ids], kind, size, cut
            )
            while payloads:  # keeps none: the memory of one that is done with serves the next
                yield payloads.popleft()

    def _gather_round(
        self, parts: list[list[int]], kind: str, size: int, cut: int
    ) -> deque[tuple[int, Payload]]:
        arrays = self._programs.gather(kind, size, cut)(
            self._local(self.runner.caches, kind), self._row(parts, size)
        )
        pieces = self._split(kind, arrays)
        return deque(
            (r, Payload(kind, r, len(ids), size, pieces[r])) for r, ids in enumerate(parts) if ids
        )

    def receive(self, payload: Payload, rank: int) -> Payload:
        """Sends another mover's payload to the devices of local rank `rank` of this one;
        asynchronous. Thread-safe."""
        if payload.size not in self.buckets:
            raise ValueError(
                f"a payload of {payload.size} blocks fits none of this side's buckets"
                f" {self.buckets}"
            )
        tp, shape = self.axes.tp, payload.pieces
        if tp > 1 or len(next(iter(shape.values()))[0]) > 1:
            specs = self.specs[payload.kind]
            shape = {
                s.name: tuple(assign(layer, tp, s.tp_dim is not None) for layer in shape[s.name])
                for s in specs
            }
        if self._on_cpu and not has_own_memory(payload):
            return BorrowedPayload(payload.kind, rank, payload.count, payload.size, shape)
        sources, targets = zip(
            *((p, self._devices[rank, t]) for t, p in leaves_of(shape)), strict=True
        )
        return Payload(
            payload.kind,
            rank,
            payload.count,
            payload.size,
            refill(shape, jax.device_put(sources, targets)),
        )

    def scatter(self, items: Sequence[tuple[Payload, Sequence[int]]]) -> None:
        """Writes payloads into the pools: (payload on one of this mover's ranks, one block id per
        row; -1: drop that row). Order within a rank is kept."""
        left = list(items)
        while left:
            first = left[0][0]
            chosen: dict[int, tuple[Payload, Sequence[int]]] = {}
            later: list[tuple[Payload, Sequence[int]]] = []
            for payload, ids in left:  # one payload per rank and call, all of one shape
                same = (payload.kind, payload.size, cut_of(payload)) == (
                    first.kind,
                    first.size,
                    cut_of(first),
                )
                blocked = payload.rank in chosen or any(
                    payload.rank == other.rank for other, _ in later
                )
                if same and not blocked:
                    chosen[payload.rank] = (payload, ids)
                else:
                    later.append((payload, ids))
            self._scatter_round(first.kind, first.size, cut_of(first), chosen)
            left = later

    def _scatter_round(
        self, kind: str, size: int, cut: int, chosen: Mapping[int, tuple[Payload, Sequence[int]]]
    ) -> None:
        for payload, ids in chosen.values():
            if len(ids) != payload.count:
                raise ValueError(f"{len(ids)} ids for a payload of {payload.count} {kind}")
        arrays = self._join(
            kind, size, cut, {rank: payload for rank, (payload, _) in chosen.items()}
        )
        row = self._target_row(kind, {rank: ids for rank, (_, ids) in chosen.items()}, size)
        written = self._programs.scatter(kind, size, cut)(
            self._local(self.runner.caches, kind), arrays, row
        )
        self.runner.caches = {**self.runner.caches, **self._global(written)}

    # ---- host side -------------------------------------------------------------------------------

    def to_host(self, payload: Payload) -> dict[str, np.ndarray]:
        """{cache: [count, layers, *entry]} with whole entries whatever tp is; waits for
        the device."""
        for x in payload.arrays():
            x.copy_to_host_async()
        out = {}
        for spec in self.specs[payload.kind]:
            split = spec.tp_dim is not None and self.axes.tp * cut_of(payload) > 1
            dim = self.split_dim(payload.kind, spec) if split else 0
            layers = []
            for devices in payload.pieces[spec.name]:
                pieces = [np.asarray(p)[: payload.count] for device in devices for p in device]
                layers.append(np.concatenate(pieces, axis=dim) if split else pieces[0])
            out[spec.name] = layers[0].copy() if self.stacked else np.stack(layers, axis=1)
        return out

    def from_host(
        self, arrays: Mapping[str, np.ndarray], rank: int, kind: str = "blocks"
    ) -> list[Payload]:
        """Payloads on local rank `rank` from `to_host` arrays of any number of blocks, in order;
        asynchronous."""
        counts = {len(arrays[s.name]) for s in self.specs[kind]}
        if len(counts) != 1:
            raise ValueError(
                f"caches of different lengths: { {n: len(a) for n, a in arrays.items()} }"
            )
        for spec in self.specs[kind]:
            expected = (spec.layers, *self._entry(kind, spec))
            given = arrays[spec.name]
            if given.shape[1:] != expected or given.dtype != np.dtype(spec.dtype):
                raise ValueError(
                    f"cache {spec.name!r}: got {given.dtype} of shape {given.shape[1:]}, expected"
                    f" {np.dtype(spec.dtype)} {expected}"
                )
        return [
            self._put(arrays, rank, kind, at, size) for at, size in self._buckets_for(counts.pop())
        ]

    def _put(
        self, arrays: Mapping[str, np.ndarray], rank: int, kind: str, at: int, size: int
    ) -> Payload:
        tp, sources, targets, shape, count = self.axes.tp, [], [], {}, 0
        for spec in self.specs[kind]:
            rows = arrays[spec.name][at : at + size]
            count = len(rows)
            if count < size:
                rows = np.concatenate([rows, np.zeros((size - count, *rows.shape[1:]), rows.dtype)])
            layers = []
            for i in range(self.num_arrays(spec)):
                whole = np.array(
                    rows if self.stacked else rows[:, i]
                )  # a copy: on a CPU the payload lies in this memory
                split = spec.tp_dim is not None and tp > 1
                parts = (
                    np.split(whole, tp, axis=self.split_dim(kind, spec)) if split else [whole] * tp
                )
                sources += [np.ascontiguousarray(p) for p in parts]
                targets += self.device_row(rank)
                layers.append(tuple((None,) for _ in parts))
            shape[spec.name] = tuple(layers)
        return Payload(kind, rank, count, size, refill(shape, jax.device_put(sources, targets)))

    # ---- between global arrays and the devices of one rank ---------------------------------------

    def _buckets_for(self, count: int) -> Iterator[tuple[int, int]]:
        """(start, bucket) pairs that cover `count` rows: largest buckets first, the rest in one
        that holds it."""
        at, largest = 0, self.buckets[-1]
        while at < count:
            left = count - at
            size = largest if left >= largest else next(b for b in self.buckets if b >= left)
            yield at, size
            at += size

    def _row(self, parts: Sequence[Sequence[int]], size: int) -> Any:
        """Per rank: `size` ids (0: padding) and how many of them count."""
        row = np.zeros((self.ranks, size + 1), np.int32)
        for line, ids in zip(row, parts, strict=True):
            line[: len(ids)] = ids
            line[size] = len(ids)
        return self._placed_row(row)

    def _target_row(self, kind: str, parts: Mapping[int, Sequence[int]], size: int) -> Any:
        """Per rank: `size` target ids; dropped rows and padding point past the pool."""
        limit = self._programs.limit(kind)
        row = np.full((self.ranks, size), limit, np.int32)
        for rank, ids in parts.items():
            wanted = np.asarray(ids, np.int32).reshape(-1)
            row[rank, : len(wanted)] = np.where(wanted >= 0, wanted, limit)
        return self._placed_row(row)

    def _placed_row(self, row: np.ndarray) -> Any:
        row = row.reshape(-1)
        if self._on_cpu and self.mesh.size == 1:
            return row  # as it is: XLA reads it where it lies
        return jax.device_put(row, self._programs.sharding(rank_spec(self.axes)))

    def _split(self, kind: str, arrays: dict[str, Any]) -> list[dict[str, Any]]:
        """Per local rank, the pieces of `gather`'s global arrays on its devices."""
        if self.mesh.size == 1:
            return [
                {name: tuple((pieces,) for pieces in layers) for name, layers in arrays.items()}
            ]
        shards = jax.tree.map(lambda x: {s.device: s.data for s in x.addressable_shards}, arrays)
        return [
            {
                s.name: tuple(
                    tuple(tuple(piece[d] for piece in layer) for d in devices)
                    for layer in shards[s.name]
                )
                for s in self.specs[kind]
            }
            for devices in self._devices
        ]

    def _join(
        self, kind: str, size: int, cut: int, payloads: Mapping[int, Payload]
    ) -> dict[str, Any]:
        """What `scatter`'s program takes: the payloads' arrays as shards; ranks without one get
        zeros that stay unwritten."""
        pieces = {rank: self._here(payload) for rank, payload in payloads.items()}
        if self.mesh.size == 1:
            return {
                name: tuple([pieces for (pieces,) in layers]) for name, layers in pieces[0].items()
            }
        blank = self._blank(kind, size, cut) if len(payloads) < self.ranks else {}
        out = {}
        for s in self.specs[kind]:
            whole, layers = self._programs.piece(kind, s, size, cut), []
            for layer in range(self.num_arrays(s)):
                joined = []
                for j in range(self.num_pieces(s, cut)):
                    parts = [
                        pieces[r][s.name][layer][t][j] if r in pieces else blank[s.name][r][t][j]
                        for r in range(self.ranks)
                        for t in range(self.axes.tp)
                    ]
                    joined.append(
                        jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, parts)
                    )
                layers.append(tuple(joined))
            out[s.name] = tuple(layers)
        return out

    def _here(self, payload: Payload) -> dict[str, Any]:
        """A payload's pieces for this side's devices. Of a borrowed one: NumPy's views of them,
        which XLA takes without copying (here for many devices, with the program's call for one),
        and which keep the memory until it is done with it."""
        if not isinstance(payload, BorrowedPayload):
            return payload.pieces
        views = {
            n: tuple([tuple([tuple([np.asarray(p) for p in d]) for d in layer]) for layer in x])
            for n, x in payload.pieces.items()
        }
        if self.mesh.size > 1:
            devices, leaves = zip(
                *((self._devices[payload.rank, t], view) for t, view in leaves_of(views)),
                strict=True,
            )
            return refill(views, jax.device_put(leaves, devices))
        return views

    def _blank(self, kind: str, size: int, cut: int) -> dict[str, Any]:
        """Zero pieces [rank][t][piece], the same for all arrays of a cache; kept."""
        key = (kind, size, cut)
        if key not in self._dummies:
            out = {}
            for s in self.specs[kind]:
                zeros = np.zeros(self.piece_shape(kind, s, size, cut * self.axes.tp), s.dtype)
                out[s.name] = [
                    [[jax.device_put(zeros, d)] * self.num_pieces(s, cut) for d in row]
                    for row in self._devices
                ]
            self._dummies[key] = out
        return self._dummies[key]

    def _local(self, caches: Caches, kind: str) -> Caches:
        """The pools of a kind over this process's ranks."""
        if self._whole:
            return {s.name: caches[s.name] for s in self.specs[kind]}
        return {
            s.name: self._moved(s, caches[s.name], self.mesh, self.ranks, self.axes.dp)
            for s in self.specs[kind]
        }

    def _global(self, caches: Caches) -> Caches:
        if self._whole:
            return caches
        specs = {s.name: s for kind in self.kinds for s in self.specs[kind]}
        return {
            n: self._moved(specs[n], layers, self.runner.mesh, self.axes.dp, self.ranks)
            for n, layers in caches.items()
        }

    def _moved(
        self, spec: CacheSpec, layers: Sequence[jax.Array], mesh: Mesh, ranks: int, of: int
    ) -> tuple[jax.Array, ...]:
        # The arrays' own specs will not do: XLA drops axes of size 1 from them, which are not of
        # size 1 in the other mesh.
        sharding = NamedSharding(mesh, kv_pools.pool_spec(spec, self.axes))
        return tuple(_rewrap(x, sharding, ranks, of) for x in layers)


def _rewrap(x: jax.Array, sharding: NamedSharding, ranks: int, of: int) -> jax.Array:
    """The same shards seen as an array over another mesh with `ranks` instead of `of` ranks; no
    bytes move."""
    shape = (x.shape[0] // of * ranks, *x.shape[1:])
    shards = [s.data for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _local_mesh(runner: Any) -> Mesh:
    axes = runner.config.axes
    devices = runner.mesh.devices.reshape(axes.dp, axes.tp)[list(runner.placement.local_ranks)]
    names = (axes.replica_axis, axes.ep_axis, axes.tp_axis)
    return Mesh(devices.reshape(len(devices), 1, axes.tp), names, axis_types=runner.mesh.axis_types)
