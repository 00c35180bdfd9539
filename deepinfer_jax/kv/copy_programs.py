"""The compiled programs that copy blocks out of an engine's pools and into them: one per kind,
bucket and cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from deepinfer_jax.kernels_pallas import use_target
from deepinfer_jax.kernels_pallas.copy_blocks import put_blocks, take_blocks
from deepinfer_jax.kv.block_layout import BlockLayout
from deepinfer_jax.models.base import Caches, CacheSpec
from deepinfer_jax.runner import kv_pools
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.mesh import rank_spec


class BlockPrograms:
    """Registers its programs with the runner's table, which compiles them at warm-up. mesh: of
    `ranks` ranks of the runner's."""

    def __init__(
        self, runner: Any, layout: BlockLayout, mesh: Mesh, ranks: int, buckets: Sequence[int]
    ) -> None:
        self.runner, self.layout, self.mesh, self.ranks, self.buckets = (
            runner,
            layout,
            mesh,
            ranks,
            tuple(buckets),
        )
        self.axes = layout.axes
        self._platform = mesh.devices.flat[0].platform

    def gather(self, kind: str, size: int, cut: int) -> Any:
        """(pools {cache: layers}, row) -> {cache: layers of pieces}; row: per rank `size` ids and
        how many of them count."""
        return self.runner.programs.get(self._key("gather", kind, size, cut))

    def scatter(self, kind: str, size: int, cut: int) -> Any:
        """(pools, payload as `gather` returns it, row) -> pools, donated; row: per rank `size` ids,
        those to drop past the pool."""
        return self.runner.programs.get(self._key("scatter", kind, size, cut))

    def register(self, kind: str, cut: int) -> None:
        """Makes the programs known; compiled at warm-up, or when first needed."""
        for name, lower in (("gather", self._lower_gather), ("scatter", self._lower_scatter)):
            for size in self.buckets:
                key = self._key(name, kind, size, cut)
                self.runner.programs.register(key, lambda f=lower, size=size: f(kind, size, cut))

    def compile(self, kind: str, cut: int) -> None:
        """register(), and compile now."""
        self.register(kind, cut)
        for name in ("gather", "scatter"):
            for size in self.buckets:
                key = self._key(name, kind, size, cut)
                self.runner.programs.put(key, self.runner.programs.lower(key).compile())

    def limit(self, kind: str) -> int:
        """Rows of a rank's pools: the first id that is dropped."""
        return self.runner.num_blocks if kind == "blocks" else self.runner.programs.num_state_slots

    def sharding(self, spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def piece(self, kind: str, spec: CacheSpec, size: int, cut: int) -> jax.ShapeDtypeStruct:
        """One piece of a payload of all ranks, as the programs take it."""
        shape = self.layout.piece_shape(kind, spec, self.ranks * size, cut)
        return jax.ShapeDtypeStruct(
            shape, spec.dtype, sharding=self.sharding(self.layout.payload_spec(kind, spec))
        )

    # ---- lowering --------------------------------------------------------------------------------

    def _key(self, name: str, kind: str, size: int, cut: int) -> ProgramKey:
        return ProgramKey(f"{name}_{kind}" if cut == 1 else f"{name}_{kind}_cut{cut}", size)

    def _lower_gather(self, kind: str, size: int, cut: int) -> Any:
        layout, specs = self.layout, self.layout.specs[kind]

        def body(caches: Caches, row: jax.Array) -> dict[str, tuple[tuple[jax.Array, ...], ...]]:
            taken = self._take([caches[s.name] for s in specs], row[:size], row[size])
            return {
                s.name: tuple(self._cut(kind, s, x, cut) for x in arrays)
                for s, arrays in zip(specs, taken, strict=True)
            }

        pieces = {
            s.name: ((layout.payload_spec(kind, s),) * layout.num_pieces(s, cut),)
            * layout.num_arrays(s)
            for s in specs
        }
        in_specs = (kv_pools.cache_specs_tree(specs, self.axes), rank_spec(self.axes))
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=pieces, check_vma=False
        )
        return jax.jit(mapped).lower(self._abstract_pools(kind), self._abstract_row(size + 1))

    def _lower_scatter(self, kind: str, size: int, cut: int) -> Any:
        layout, specs = self.layout, self.layout.specs[kind]

        def body(caches: Caches, payload: dict[str, Any], row: jax.Array) -> Caches:
            rows = [[self._join(kind, s, pieces) for pieces in payload[s.name]] for s in specs]
            written = self._put([caches[s.name] for s in specs], row, rows)
            return {s.name: tuple(pools) for s, pools in zip(specs, written, strict=True)}

        caches = kv_pools.cache_specs_tree(specs, self.axes)
        pieces = {
            s.name: ((layout.payload_spec(kind, s),) * layout.num_pieces(s, cut),)
            * layout.num_arrays(s)
            for s in specs
        }
        payload = {
            s.name: ((self.piece(kind, s, size, cut),) * layout.num_pieces(s, cut),)
            * layout.num_arrays(s)
            for s in specs
        }
        in_specs = (caches, pieces, rank_spec(self.axes))
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=caches, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=(0,)).lower(
            self._abstract_pools(kind), payload, self._abstract_row(size)
        )

    def _take(
        self, caches: Sequence[Sequence[jax.Array]], ids: jax.Array, count: jax.Array
    ) -> list[Sequence[jax.Array]]:
        """Per cache its arrays (`BlockLayout.stacked`)."""
        if not self.layout.stacked:
            return [[pool[ids] for pool in pools] for pools in caches]
        with use_target(self._platform):
            return [[x] for x in take_blocks(caches, ids, count)]

    def _put(
        self,
        caches: Sequence[Sequence[jax.Array]],
        ids: jax.Array,
        rows: Sequence[Sequence[jax.Array]],
    ) -> Sequence[Sequence[jax.Array]]:
        if not self.layout.stacked:
            pairs = [
                zip(pools, arrays, strict=True) for pools, arrays in zip(caches, rows, strict=True)
            ]
            return [[pool.at[ids].set(x, mode="drop") for pool, x in pair] for pair in pairs]
        with use_target(self._platform):
            return put_blocks(caches, ids, [x for (x,) in rows])

    def _cut(self, kind: str, spec: CacheSpec, rows: jax.Array, cut: int) -> tuple[jax.Array, ...]:
        pieces = self.layout.num_pieces(spec, cut)
        return (
            (rows,)
            if pieces == 1
            else tuple(jnp.split(rows, pieces, axis=self.layout.split_dim(kind, spec)))
        )

    def _join(self, kind: str, spec: CacheSpec, pieces: Sequence[jax.Array]) -> jax.Array:
        return (
            pieces[0]
            if len(pieces) == 1
            else jnp.concatenate(pieces, axis=self.layout.split_dim(kind, spec))
        )

    def _abstract_pools(self, kind: str) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        slots, layout = self.runner.programs.num_state_slots, self.layout
        out = {}
        for s in layout.specs[kind]:
            shape = kv_pools.pool_shape(
                s, self.axes, self.runner.num_blocks, layout.block_size, slots
            )
            shape = (shape[0] // self.axes.dp * self.ranks, *shape[1:])
            out[s.name] = (
                jax.ShapeDtypeStruct(
                    shape, s.dtype, sharding=self.sharding(kv_pools.pool_spec(s, self.axes))
                ),
            ) * s.layers
        return out

    def _abstract_row(self, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self.ranks * length,), jnp.int32, sharding=self.sharding(rank_spec(self.axes))
        )
