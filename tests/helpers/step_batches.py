"""Hand-built StepBatches that drive a model without the engine: whole prompts, chunks, decode
steps, on one rank or a mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.models.base import ParallelAxes, StepBatch
from deepinfer_jax.runner import kv_pools

BLOCK = 8
NUM_SLOTS = 8


@dataclass
class Rank:
    """Sequences of one rank: how many tokens each has cached, and its pages."""

    pages: int
    lens: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    used: int = 0
    slots: dict[int, int] = field(default_factory=dict)  # rows of per-sequence caches, from 1 on

    def rows(self, seq: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and write slots of `tokens`, appended to sequence `seq`."""
        start = self.lens.setdefault(seq, 0)
        self.slots.setdefault(seq, len(self.slots) + 1)
        table = self.tables.setdefault(seq, [])
        self.lens[seq] = start + len(tokens)
        while len(table) * BLOCK < self.lens[seq]:
            table.append(self.used)
            self.used += 1
        position = np.arange(start, start + len(tokens), dtype=np.int32)
        return position, np.array(
            [table[p // BLOCK] * BLOCK + p % BLOCK for p in position], np.int32
        )


def build_batch(
    rank: Rank,
    work: list[tuple[int, np.ndarray]],
    rows: int,
    seqs: int,
    num_blocks: int,
    *,
    decode: bool = False,
) -> StepBatch:
    """The batch that appends each (sequence, tokens) of `work`; `rows` and `seqs` are the padded
    sizes. Decode: one token each."""
    tokens, positions, seq_ids = (
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int32),
        np.full(rows, seqs, np.int32),
    )
    slots = np.full(rows, num_blocks * BLOCK, np.int32)
    tables, lens, starts = (
        np.zeros((seqs, rank.pages), np.int32),
        np.zeros(seqs, np.int32),
        np.zeros(seqs + 1, np.int32),
    )
    at, state_slots = 0, np.zeros(seqs, np.int32)
    for s, (seq, toks) in enumerate(work):
        n = len(toks)
        positions[at : at + n], slots[at : at + n] = rank.rows(seq, toks)
        tokens[at : at + n], seq_ids[at : at + n] = toks, s
        tables[s, : len(rank.tables[seq])], lens[s] = rank.tables[seq], rank.lens[seq]
        state_slots[s] = rank.slots[seq]
        at += n
        starts[s + 1 :] = at
    if decode:
        starts = np.arange(seqs + 1, dtype=np.int32)
    return StepBatch(
        tokens,
        positions,
        slots,
        tables,
        lens,
        starts,
        seq_ids,
        state_slots,
        is_decode=decode,
        block_size=BLOCK,
    )


class Driver:
    """One loaded model on a mesh (replica, ep, tp); `step` runs a batch per rank and returns hidden
    states and logits."""

    def __init__(
        self,
        loaded,
        axes: ParallelAxes | None = None,
        mesh: Mesh | None = None,
        *,
        num_blocks: int = 64,
        pages: int = 16,
    ) -> None:
        axes = axes or ParallelAxes()
        self.loaded, self.axes, self.num_blocks = loaded, axes, num_blocks
        self.mesh = mesh or make_mesh(axes)
        self.ranks = [Rank(pages) for _ in range(axes.dp)]
        dtype = jnp.float32
        self.dp = P((axes.replica_axis, axes.ep_axis))
        self.cache_specs, self.caches = {}, {}
        for spec in loaded.model_class.cache_specs(loaded.config, axes, dtype):
            self.cache_specs[spec.name] = (kv_pools.pool_spec(spec, axes),) * spec.layers
            sharding = NamedSharding(self.mesh, self.cache_specs[spec.name][0])
            shape = kv_pools.pool_shape(spec, axes, num_blocks, BLOCK, NUM_SLOTS)
            # garbage where nothing was written: it must never reach a result
            self.caches[spec.name] = tuple(
                jax.device_put(jnp.full(shape, 7.0, spec.dtype), sharding)
                for _ in range(spec.layers)
            )
        self._step = jax.jit(self._sharded, donate_argnums=1)
        self.traces = 0

    def _sharded(self, params, caches, batch):
        self.traces += 1

        def local(params, caches, batch):
            model = nnx.merge(self.loaded.graphdef, params)
            hidden, caches, load = model.forward_with_load(caches, batch)
            return model.compute_logits(hidden), caches, load[None]

        batch_specs = jax.tree.map(lambda _: self.dp, batch)
        specs = (self.loaded.param_specs, self.cache_specs, batch_specs)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(self.dp, self.cache_specs, self.dp),
            check_vma=False,
        )(params, caches, batch)

    def step(
        self,
        work: list[list[tuple[int, np.ndarray]]],
        rows: int,
        seqs: int,
        *,
        decode: bool = False,
    ) -> list[np.ndarray]:
        """work[rank]: (sequence, tokens) pairs. Returns, per rank, the logits of its rows [rows,
        V]; `load` keeps the expert counts."""
        args = [
            build_batch(r, w, rows, seqs, self.num_blocks, decode=decode)
            for r, w in zip(self.ranks, work, strict=True)
        ]
        batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *args)
        logits, self.caches, load = self._step(self.loaded.params, self.caches, batch)
        self.load = np.asarray(load)
        return np.split(np.asarray(logits), self.axes.dp)


def make_mesh(axes: ParallelAxes) -> Mesh:
    shape = (axes.dp // axes.ep, axes.ep, axes.tp)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, (axes.replica_axis, axes.ep_axis, axes.tp_axis))
