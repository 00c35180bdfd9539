"""Moving KV blocks (and state rows) out of an engine's pools and into another's: the data plane of hand-over and KV store.

A `BlockMover` belongs to one engine's runner and knows its declared caches, not the model:

    mover = BlockMover(runner)                             # registers its programs: warm-up compiles them
    for payload in mover.gather(per_rank_ids):             # enqueues, waits for nothing; payloads of <= max bucket blocks
        moved = target.receive(payload, rank)              # device to device, asynchronous; meshes, dp, ep and tp may differ
        ...
        if moved.ready():                                  # the bytes have arrived
            target.scatter([(moved, block_ids)])           # enqueues; the pools are donated and written in place

    arrays = mover.to_host(payload)                        # {cache: np [count, layers, *entry]}, waits
    payload = mover.from_host(arrays, rank)                # the way back, on that rank's devices

`kind` is "blocks" (paged caches, ids are block ids) or "states" (per-sequence caches, ids are state rows); ids are local to
a rank. `describe()` says what a block is, for whoever stores or receives it elsewhere (`Layout` in handoff.py compares it).

Order on the device is program order: a gather reads what every step enqueued before it has written, and a step enqueued
after it may overwrite the blocks. A payload is a copy, so pools and payload never share memory.

Between meshes a payload travels device by device, so no transfer waits for its producer (a resharding device_put would). When
tp differs, the split dimension is cut into lcm(tp, tp') pieces on the sending side: see `prepare_for`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax import kv_cache
from deepinfer_jax.models.base import Caches, CacheSpec, PagedCache
from deepinfer_jax.parallel import rank_spec
from deepinfer_jax.programs import ProgramKey

BUCKETS = (4, 16, 64)
"""Blocks per payload. Rows past `count` are neither read nor written on CPU; elsewhere they cost bandwidth."""

KINDS = ("blocks", "states")


@dataclass(frozen=True)
class Payload:
    """`count` blocks (or state rows) of every cache of a kind, on the devices of one DP rank, in a bucket of `size`.

    pieces[cache][layer][t] is the tuple of single-device arrays on tensor-parallel device t: [size, *entry], the split
    dimension cut into equal pieces (one, unless the two sides' tp differ).
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
        return all(x.is_ready() for x in self.arrays())

    def wait(self) -> None:
        jax.block_until_ready(self.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of the valid rows, copies on replicated devices included."""
        return sum(x.nbytes for x in self.arrays()) * self.count // self.size


class BlockMover:
    """Gathers, receives and scatters blocks of one engine. All calls but `to_host` only enqueue.

    runner: a ModelRunner, or anything with its attributes cache_specs, caches, mesh, config, num_blocks, programs, placement.
    The caller serialises calls that touch the pools (gather, scatter) with the engine's steps; `receive` may run anywhere.
    """

    def __init__(self, runner: Any, buckets: Sequence[int] = BUCKETS) -> None:
        self.runner = runner
        self.axes, self.block_size = runner.config.axes, runner.config.block_size
        self.buckets = tuple(sorted(buckets))
        self.ranks = len(runner.placement.local_ranks)
        self._whole = self.ranks == self.axes.dp  # one process owns all ranks: the pools are used as they are
        self.mesh = runner.mesh if self._whole else _local_mesh(runner)
        self._devices = self.mesh.devices.reshape(self.ranks, self.axes.tp)
        self.specs = {
            "blocks": tuple(s for s in runner.cache_specs if isinstance(s, PagedCache)),
            "states": tuple(s for s in runner.cache_specs if not isinstance(s, PagedCache)),
        }
        self._cuts = {1}  # pieces per device that programs exist for
        self._dummies: dict[tuple, list] = {}
        self._on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        for kind in self.kinds:
            self._register(kind, 1)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds this model has."""
        return tuple(k for k in KINDS if self.specs[k])

    def describe(self) -> dict[str, Any]:
        """What one block and one state row are, independent of mesh and tp: plain values, equal iff contents can be exchanged."""
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
        return sum(s.layers * math.prod(self._entry(kind, s)) * np.dtype(s.dtype).itemsize for s in self.specs[kind])

    def device_row(self, rank: int) -> list[jax.Device]:
        """The tensor-parallel devices of a local rank, in the order of a payload's pieces."""
        return list(self._devices[rank])

    def shard_shape(self, kind: str, spec: CacheSpec, size: int) -> tuple[int, ...]:
        """Shape of one device's array of a payload whose bucket is `size`, uncut."""
        shape = [size, *self._entry(kind, spec)]
        if spec.tp_dim is not None:
            shape[self._split_dim(kind, spec)] //= self.axes.tp
        return tuple(shape)

    def row_shapes(self, kind: str = "blocks") -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{cache: ((layers, *entry), dtype)}: one block (or state row) in `to_host`'s arrays."""
        return {s.name: ((s.layers, *self._entry(kind, s)), np.dtype(s.dtype)) for s in self.specs[kind]}

    def _entry(self, kind: str, spec: CacheSpec) -> tuple[int, ...]:
        return (self.block_size, *spec.entry_shape) if kind == "blocks" else tuple(spec.shape)

    # ---- device side -----------------------------------------------------------------------------------------------

    def gather(self, per_rank_ids: Sequence[Sequence[int]], kind: str = "blocks", cut: int = 1) -> list[list[Payload]]:
        """Copies blocks out of the pools. per_rank_ids: one list per local rank. Returns, per rank, payloads that hold its
        ids in order, each of at most the largest bucket. cut: pieces per device (see `prepare_for`)."""
        if len(per_rank_ids) != self.ranks:
            raise ValueError(f"{len(per_rank_ids)} lists of {kind} for {self.ranks} local ranks")
        out: list[list[Payload]] = [[] for _ in per_rank_ids]
        for at, size in self._pieces(max(map(len, per_rank_ids))):
            parts = [list(ids[at : at + size]) for ids in per_rank_ids]
            row = self._row(parts, size)
            program = self.runner.programs.get(self._key(f"gather_{kind}", size, cut))
            arrays = program(self._local(self.runner.caches, kind), row)
            by_rank = self._split(kind, arrays)
            for rank, part in enumerate(parts):
                if part:
                    out[rank].append(Payload(kind, rank, len(part), size, by_rank[rank]))
        return out

    def receive(self, payload: Payload, rank: int) -> Payload:
        """Sends another mover's payload to the devices of local rank `rank` of this one; asynchronous. Thread-safe."""
        if payload.size not in self.buckets:
            raise ValueError(f"a payload of {payload.size} blocks fits none of this side's buckets {self.buckets}")
        sources, targets, shape = [], [], {}
        for spec in self.specs[payload.kind]:
            layers = []
            for layer in payload.pieces[spec.name]:
                placed = _assign(layer, self.axes.tp, spec.tp_dim is not None)
                layers.append(placed)
                for t, pieces in enumerate(placed):
                    sources += pieces
                    targets += [self._devices[rank, t]] * len(pieces)
            shape[spec.name] = tuple(layers)
        moved = iter(jax.device_put(sources, targets))
        return Payload(payload.kind, rank, payload.count, payload.size, jax.tree.map(lambda _: next(moved), shape))

    def scatter(self, items: Sequence[tuple[Payload, Sequence[int]]]) -> None:
        """Writes payloads into the pools: (payload on one of this mover's ranks, one block id per row; -1: drop that row).
        Order within a rank is kept."""
        left = list(items)
        while left:
            first, chosen, later = left[0][0], {}, []
            for payload, ids in left:  # one payload per rank and call, all of one shape
                same = (payload.kind, payload.size, _cut_of(payload)) == (first.kind, first.size, _cut_of(first))
                blocked = payload.rank in chosen or any(payload.rank == other.rank for other, _ in later)
                if same and not blocked:
                    chosen[payload.rank] = (payload, ids)
                else:
                    later.append((payload, ids))
            self._scatter_round(first.kind, first.size, _cut_of(first), chosen)
            left = later

    def _scatter_round(self, kind: str, size: int, cut: int, chosen: Mapping[int, tuple[Payload, Sequence[int]]]) -> None:
        parts: list[Sequence[int]] = [[] for _ in range(self.ranks)]
        for rank, (payload, ids) in chosen.items():
            if len(ids) != payload.count:
                raise ValueError(f"{len(ids)} ids for a payload of {payload.count} {kind}")
            parts[rank] = ids
        program = self.runner.programs.get(self._key(f"scatter_{kind}", size, cut))
        arrays = self._join(kind, size, cut, {rank: p for rank, (p, _) in chosen.items()})
        written = program(self._local(self.runner.caches, kind), arrays, self._target_row(kind, parts, size))
        self.runner.caches = {**self.runner.caches, **self._global(written)}

    def prepare_for(self, peer_tp: int) -> int:
        """Compiles, once, what a peer with another tp needs; returns `cut` for gather(). At connect, not in steady state."""
        cut = math.lcm(self.axes.tp, peer_tp) // self.axes.tp
        if cut not in self._cuts:
            self._check_cut(cut)
            self._cuts.add(cut)
            for kind in self.kinds:
                for key in self._register(kind, cut):
                    self.runner.programs.put(key, self.runner.programs.lower(key).compile())
        return cut

    # ---- host side -------------------------------------------------------------------------------------------------

    def to_host(self, payload: Payload) -> dict[str, np.ndarray]:
        """{cache: [count, layers, *entry]} with whole entries whatever tp is; waits for the device."""
        for x in payload.arrays():
            x.copy_to_host_async()
        out = {}
        for spec in self.specs[payload.kind]:
            split = spec.tp_dim is not None and self.axes.tp * _cut_of(payload) > 1
            dim = self._split_dim(payload.kind, spec) if split else 0
            layers = []
            for devices in payload.pieces[spec.name]:
                pieces = [np.asarray(p)[: payload.count] for device in devices for p in device]
                layers.append(np.concatenate(pieces, axis=dim) if split else pieces[0])
            out[spec.name] = np.stack(layers, axis=1)
        return out

    def from_host(self, arrays: Mapping[str, np.ndarray], rank: int, kind: str = "blocks") -> list[Payload]:
        """Payloads on local rank `rank` from `to_host` arrays of any number of blocks, in order; asynchronous."""
        counts = {len(arrays[s.name]) for s in self.specs[kind]}
        if len(counts) != 1:
            raise ValueError(f"caches of different lengths: { {n: len(a) for n, a in arrays.items()} }")
        for spec in self.specs[kind]:
            expected = (spec.layers, *self._entry(kind, spec))
            given = arrays[spec.name]
            if given.shape[1:] != expected or given.dtype != np.dtype(spec.dtype):
                raise ValueError(
                    f"cache {spec.name!r}: got {given.dtype} of shape {given.shape[1:]}, expected {np.dtype(spec.dtype)} {expected}"
                )
        return [self._put(arrays, rank, kind, at, size) for at, size in self._pieces(counts.pop())]

    def _put(self, arrays: Mapping[str, np.ndarray], rank: int, kind: str, at: int, size: int) -> Payload:
        tp, sources, targets, shape, count = self.axes.tp, [], [], {}, 0
        for spec in self.specs[kind]:
            rows = arrays[spec.name][at : at + size]
            count = len(rows)
            if count < size:
                rows = np.concatenate([rows, np.zeros((size - count, *rows.shape[1:]), rows.dtype)])
            layers = []
            for layer in range(spec.layers):
                whole = np.ascontiguousarray(rows[:, layer])
                split = spec.tp_dim is not None and tp > 1
                parts = np.split(whole, tp, axis=self._split_dim(kind, spec)) if split else [whole] * tp
                sources += [np.ascontiguousarray(p) for p in parts]
                targets += list(self._devices[rank])
                layers.append(tuple((None,) for _ in parts))
            shape[spec.name] = tuple(layers)
        moved = iter(jax.device_put(sources, targets))
        pieces = {n: tuple(tuple((next(moved),) for _ in devices) for devices in layers) for n, layers in shape.items()}
        return Payload(kind, rank, count, size, pieces)

    # ---- programs --------------------------------------------------------------------------------------------------

    def _key(self, name: str, size: int, cut: int) -> ProgramKey:
        return ProgramKey(name if cut == 1 else f"{name}_cut{cut}", size)

    def _register(self, kind: str, cut: int) -> list[ProgramKey]:
        """Makes the programs known to the runner's table, which compiles them at warm-up."""
        keys = []
        for size in self.buckets:
            for name, function in (("gather", self._lower_gather), ("scatter", self._lower_scatter)):
                key = self._key(f"{name}_{kind}", size, cut)
                self.runner.programs.register(key, lambda f=function, size=size: f(kind, size, cut))
                keys.append(key)
        return keys

    def _check_cut(self, cut: int) -> None:
        for kind in self.kinds:
            for spec in self.specs[kind]:
                if spec.tp_dim is None:
                    continue
                width = (spec.entry_shape if isinstance(spec, PagedCache) else spec.shape)[spec.tp_dim]
                if width % (self.axes.tp * cut):
                    raise ValueError(f"cache {spec.name!r}: dimension of {width} cannot be cut into {self.axes.tp * cut} pieces")

    def _split_dim(self, kind: str, spec: CacheSpec) -> int:
        """Dimension of a [size, *entry] array that tp splits."""
        return spec.tp_dim + (2 if kind == "blocks" else 1)

    def _num_pieces(self, spec: CacheSpec, cut: int) -> int:
        return 1 if spec.tp_dim is None else cut

    def _payload_spec(self, kind: str, spec: CacheSpec) -> P:
        dims: list[str | None] = [None] * len(self._entry(kind, spec))
        if spec.tp_dim is not None and self.axes.tp > 1:
            dims[self._split_dim(kind, spec) - 1] = self.axes.tp_axis
        return P(self.axes.dp_axes, *dims)

    def _payload_specs(self, kind: str, cut: int) -> dict[str, tuple[tuple[P, ...], ...]]:
        return {s.name: ((self._payload_spec(kind, s),) * self._num_pieces(s, cut),) * s.layers for s in self.specs[kind]}

    def _cache_specs(self, kind: str) -> dict[str, tuple[P, ...]]:
        return kv_cache.cache_specs_tree(self.specs[kind], self.axes)

    def _lower_gather(self, kind: str, size: int, cut: int) -> Any:
        def body(caches: Caches, row: jax.Array) -> dict[str, tuple[tuple[jax.Array, ...], ...]]:
            names, ids, count = list(caches), row[:size], row[size]
            taken = _take([x for n in names for x in caches[n]], ids, count, self._on_cpu)
            taken = iter(taken)
            return {s.name: tuple(self._cut(kind, s, next(taken), cut) for _ in range(s.layers)) for s in self.specs[kind]}

        specs = (self._cache_specs(kind), rank_spec(self.axes))
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=self._payload_specs(kind, cut), check_vma=False)
        return jax.jit(mapped).lower(self._abstract_pools(kind), self._abstract_row(size))

    def _lower_scatter(self, kind: str, size: int, cut: int) -> Any:
        def body(caches: Caches, payload, row: jax.Array) -> Caches:
            ids, sources, count = row[:size], row[size : 2 * size], row[2 * size]
            pools = [x for s in self.specs[kind] for x in caches[s.name]]
            rows = [self._join_pieces(kind, s, pieces) for s in self.specs[kind] for pieces in payload[s.name]]
            written = iter(_write(pools, ids, sources, rows, count, self._on_cpu))
            return {s.name: tuple(next(written) for _ in range(s.layers)) for s in self.specs[kind]}

        caches = self._cache_specs(kind)
        specs = (caches, self._payload_specs(kind, cut), rank_spec(self.axes))
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=caches, check_vma=False)
        args = (self._abstract_pools(kind), self._abstract_payload(kind, size, cut), self._abstract_row(2 * size))
        return jax.jit(mapped, donate_argnums=(0,)).lower(*args)

    def _cut(self, kind: str, spec: CacheSpec, rows: jax.Array, cut: int) -> tuple[jax.Array, ...]:
        pieces = self._num_pieces(spec, cut)
        return (rows,) if pieces == 1 else tuple(jnp.split(rows, pieces, axis=self._split_dim(kind, spec)))

    def _join_pieces(self, kind: str, spec: CacheSpec, pieces: Sequence[jax.Array]) -> jax.Array:
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=self._split_dim(kind, spec))

    def _abstract_pools(self, kind: str) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        slots = self.runner.programs.num_state_slots
        out = {}
        for s in self.specs[kind]:
            shape = kv_cache.pool_shape(s, self.axes, self.runner.num_blocks, self.block_size, slots)
            shape = (shape[0] // self.axes.dp * self.ranks, *shape[1:])
            out[s.name] = (jax.ShapeDtypeStruct(shape, s.dtype, sharding=self._sharding(kv_cache.pool_spec(s, self.axes))),) * s.layers
        return out

    def _abstract_payload(self, kind: str, size: int, cut: int) -> dict[str, Any]:
        out = {}
        for s in self.specs[kind]:
            piece = jax.ShapeDtypeStruct(
                self._piece_shape(kind, s, size, cut), s.dtype, sharding=self._sharding(self._payload_spec(kind, s))
            )
            out[s.name] = ((piece,) * self._num_pieces(s, cut),) * s.layers
        return out

    def _piece_shape(self, kind: str, spec: CacheSpec, size: int, cut: int) -> tuple[int, ...]:
        shape = [self.ranks * size, *self._entry(kind, spec)]
        if spec.tp_dim is not None:
            shape[self._split_dim(kind, spec)] //= cut
        return tuple(shape)

    def _abstract_row(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.ranks * (size + 1),), jnp.int32, sharding=self._sharding(rank_spec(self.axes)))

    def _sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    # ---- between global arrays and the devices of one rank ---------------------------------------------------------

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """(start, bucket) pairs that cover `count` rows: largest buckets first, the rest in one that holds it."""
        at, largest = 0, self.buckets[-1]
        while at < count:
            left = count - at
            size = largest if left >= largest else next(b for b in self.buckets if b >= left)
            yield at, size
            at += size

    def _row(self, parts: Sequence[Sequence[int]], size: int) -> jax.Array:
        """Per rank: `size` ids (0: padding) and how many of them count."""
        row = np.zeros((self.ranks, size + 1), np.int32)
        for line, ids in zip(row, parts, strict=True):
            line[: len(ids)] = ids
            line[size] = len(ids)
        return jax.device_put(row.reshape(-1), self._sharding(rank_spec(self.axes)))

    def _target_row(self, kind: str, parts: Sequence[Sequence[int]], size: int) -> jax.Array:
        """Per rank: `size` target ids, the payload row that each gets, and how many of them count. Where XLA's scatter is used
        every row is written, so there dropped rows and padding point past the pool."""
        limit = self.runner.num_blocks if kind == "blocks" else self.runner.programs.num_state_slots
        row = np.full((self.ranks, 2 * size + 1), limit, np.int32)
        for line, ids in zip(row, parts, strict=True):
            ids = np.asarray(ids, np.int32).reshape(-1)
            live = np.flatnonzero(ids >= 0)
            if self._on_cpu:
                line[: len(live)], line[size : size + len(live)] = ids[live], live
            else:
                line[live] = ids[live]
            line[-1] = len(live)
        return jax.device_put(row.reshape(-1), self._sharding(rank_spec(self.axes)))

    def _split(self, kind: str, arrays: dict[str, Any]) -> list[dict[str, Any]]:
        """Per local rank, the pieces of `gather`'s global arrays on its devices."""
        shards = jax.tree.map(lambda x: {s.device: s.data for s in x.addressable_shards}, arrays)
        out = []
        for devices in self._devices:
            one = {
                s.name: tuple(tuple(tuple(piece[d] for piece in layer) for d in devices) for layer in shards[s.name])
                for s in self.specs[kind]
            }
            out.append(one)
        return out

    def _join(self, kind: str, size: int, cut: int, payloads: Mapping[int, Payload]) -> dict[str, Any]:
        """Global arrays whose shards are the payloads' arrays; ranks without one get zeros that stay unwritten."""
        blank = self._blank(kind, size, cut) if len(payloads) < self.ranks else None
        out = {}
        for s in self.specs[kind]:
            shape, sharding = self._piece_shape(kind, s, size, cut), self._sharding(self._payload_spec(kind, s))
            layers = []
            for layer in range(s.layers):
                pieces = []
                for j in range(self._num_pieces(s, cut)):
                    parts = [
                        payloads[r].pieces[s.name][layer][t][j] if r in payloads else blank[s.name][r][t][j]
                        for r in range(self.ranks)
                        for t in range(self.axes.tp)
                    ]
                    pieces.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
                layers.append(tuple(pieces))
            out[s.name] = tuple(layers)
        return out

    def _blank(self, kind: str, size: int, cut: int) -> dict[str, Any]:
        """Zero pieces [rank][t][piece], the same for all layers of a cache; kept."""
        key = (kind, size, cut)
        if key not in self._dummies:
            out = {}
            for s in self.specs[kind]:
                shape = list(self._piece_shape(kind, s, size, cut))
                shape[0] = size
                if s.tp_dim is not None:
                    shape[self._split_dim(kind, s)] //= self.axes.tp
                zeros = np.zeros(shape, s.dtype)
                out[s.name] = [[[jax.device_put(zeros, d)] * self._num_pieces(s, cut) for d in row] for row in self._devices]
            self._dummies[key] = out
        return self._dummies[key]

    def _local(self, caches: Caches, kind: str) -> Caches:
        """The pools of a kind over this process's ranks."""
        if self._whole:
            return {s.name: caches[s.name] for s in self.specs[kind]}
        return {s.name: self._moved(s, caches[s.name], self.mesh, self.ranks, self.axes.dp) for s in self.specs[kind]}

    def _global(self, caches: Caches) -> Caches:
        if self._whole:
            return caches
        specs = {s.name: s for kind in self.kinds for s in self.specs[kind]}
        return {n: self._moved(specs[n], layers, self.runner.mesh, self.axes.dp, self.ranks) for n, layers in caches.items()}

    def _moved(self, spec: CacheSpec, layers: Sequence[jax.Array], mesh: Mesh, ranks: int, of: int) -> tuple[jax.Array, ...]:
        # The arrays' own specs will not do: XLA drops axes of size 1 from them, which are not of size 1 in the other mesh.
        sharding = NamedSharding(mesh, kv_cache.pool_spec(spec, self.axes))
        return tuple(_rewrap(x, sharding, ranks, of) for x in layers)


def _rewrap(x: jax.Array, sharding: NamedSharding, ranks: int, of: int) -> jax.Array:
    """The same shards seen as an array over another mesh with `ranks` instead of `of` ranks; no bytes move."""
    shape = (x.shape[0] // of * ranks, *x.shape[1:])
    shards = [s.data for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _local_mesh(runner: Any) -> Mesh:
    axes = runner.config.axes
    devices = runner.mesh.devices.reshape(axes.dp, axes.tp)[list(runner.placement.local_ranks)]
    names = (axes.replica_axis, axes.ep_axis, axes.tp_axis)
    return Mesh(devices.reshape(len(devices), 1, axes.tp), names, axis_types=runner.mesh.axis_types)


def _assign(layer: tuple[tuple[jax.Array, ...], ...], tp: int, split: bool) -> tuple[tuple[jax.Array, ...], ...]:
    """Which pieces each of `tp` receiving devices gets, from those of the sending devices."""
    if not split:
        return tuple(layer[t % len(layer)] for t in range(tp))
    pieces = [p for device in layer for p in device]
    if len(pieces) % tp:
        raise ValueError(f"{len(pieces)} pieces cannot be shared by {tp} devices: gather with cut=prepare_for({tp})")
    each = len(pieces) // tp
    return tuple(tuple(pieces[t * each : (t + 1) * each]) for t in range(tp))


def _cut_of(payload: Payload) -> int:
    """Pieces per device of the caches that tp splits."""
    return max(len(layers[0][0]) for layers in payload.pieces.values())


def _take(pools: Sequence[jax.Array], ids: jax.Array, count: jax.Array, on_cpu: bool) -> list[jax.Array]:
    """Rows `ids` of every pool. On CPU only `count` of them, copied one by one: XLA's gather is slower there."""
    if not on_cpu:
        return [pool[ids] for pool in pools]
    out = tuple(jnp.zeros((ids.shape[0], *pool.shape[1:]), pool.dtype) for pool in pools)

    def one(i, out):
        rows = [jax.lax.dynamic_slice_in_dim(pool, ids[i], 1) for pool in pools]
        return tuple(jax.lax.dynamic_update_slice_in_dim(o, row, i, 0) for o, row in zip(out, rows, strict=True))

    return list(jax.lax.fori_loop(0, count, one, out))


def _write(pools, ids: jax.Array, sources: jax.Array, rows, count: jax.Array, on_cpu: bool) -> list[jax.Array]:
    """Pools with rows written at `ids`. On CPU rows `sources` one by one (XLA's scatter takes 15 times as long there), elsewhere
    row i at ids[i], where ids out of range are dropped."""
    if not on_cpu:
        return [pool.at[ids].set(row, mode="drop") for pool, row in zip(pools, rows, strict=True)]

    def one(i, pools):
        taken = [jax.lax.dynamic_slice_in_dim(row, sources[i], 1) for row in rows]
        return tuple(jax.lax.dynamic_update_slice_in_dim(pool, row, ids[i], 0) for pool, row in zip(pools, taken, strict=True))

    return list(jax.lax.fori_loop(0, count, one, tuple(pools)))
