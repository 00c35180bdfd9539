"""The step functions and the table of compiled programs, one per shape bucket.

Everything here is a function of shapes, so the same code serves an engine with arrays and a planner
without a device. Every program is `f(params, caches, state, packed inputs) -> (caches, state,
results)`; caches and state are donated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.models.base import Caches, CacheSpec, StepBatch
from deepinfer_jax.models.layers.expert_layers import OWN_EXPERTS, expert_groups
from deepinfer_jax.runner import kv_pools, sampler
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.runner.decode_state import DecodeState, admit_layout, pack_result
from deepinfer_jax.runner.expert_counts import ExpertCounts
from deepinfer_jax.runner.gpu_settings import compiler_options
from deepinfer_jax.runner.mesh import rank_spec
from deepinfer_jax.runner.packing import PackedLayout
from deepinfer_jax.runner.sampling_state import SamplingState, record_outputs, record_prompt

logger = logging.getLogger(__name__)

SAMPLE_TILE = 16
"""Rows of logits computed at a time in a prefill step; the number of tiles is dynamic, so unused
rows cost nothing."""
DECODE_SAMPLE_TILE = 64
"""Rows a decode step samples at a time: the sampler's temporaries are several times its logits,
which at 256 rows of a 128k vocabulary would be the largest thing in the program and make a
COMPLETION engine's memory profile exceed a PROMPT engine's."""
ADMIT_BUCKETS = (1, 8, 64)
UPDATE_BUCKET = 256
CLONE_BUCKET = 16


def prefill_layout(tokens: int, max_seqs: int, max_pages: int) -> PackedLayout:
    """Inputs of a prefill step of up to `tokens` packed rows of up to `max_seqs` sequences."""
    i32 = np.int32
    return PackedLayout(
        {
            "tokens": ((tokens,), i32),
            "q_starts": ((max_seqs + 1,), i32),
            "kv_lens": ((max_seqs,), i32),
            "state_slots": ((max_seqs,), i32),
            "block_tables": ((max_seqs, max_pages), i32),
            "num_samples": ((), i32),  # sequences whose last chunk this is: they sample a token
            "sample_seqs": ((max_seqs,), i32),
            "sample_slots": ((max_seqs,), i32),
            "num_prompt_logprobs": ((), i32),
            "logprob_rows": ((tokens,), i32),
            "logprob_targets": ((tokens,), i32),
        }
    )


def decode_layout(rows: int) -> PackedLayout:
    """Inputs of a decode step: the slots that take part (num_slots: padding), in how many of the
    program's steps each takes part, and new block-table entries."""
    updates = max(rows, 8)
    fields = {"slots": ((rows,), np.int32), "row_steps": ((rows,), np.int32)}
    fields |= {f"update_{name}": ((updates,), np.int32) for name in ("slots", "pages", "blocks")}
    return PackedLayout(fields)


def update_layout() -> PackedLayout:
    return PackedLayout(
        {f"update_{name}": ((UPDATE_BUCKET,), np.int32) for name in ("slots", "pages", "blocks")}
    )


def counts_layout(max_tokens: int) -> PackedLayout:
    """Inputs that fill the penalty tables of one slot: its tokens, how many of them are prompt, how
    many in all."""
    return PackedLayout(
        {
            "slot": ((), np.int32),
            "num_prompt": ((), np.int32),
            "num_tokens": ((), np.int32),
            "tokens": ((max_tokens,), np.int32),
        }
    )


def clone_layout() -> PackedLayout:
    return PackedLayout(
        {"sources": ((CLONE_BUCKET,), np.int32), "targets": ((CLONE_BUCKET,), np.int32)}
    )


@dataclass(frozen=True)
class ProgramKey:
    """kind: a name of `StepPrograms.function`; size: its bucket; steps: decode steps
    per dispatch."""

    kind: str
    size: int = 0
    steps: int = 1

    def __str__(self) -> str:
        return f"{self.kind}[{self.size}]" + (f"x{self.steps}" if self.steps > 1 else "")


class CompileAfterWarmUp(RuntimeError):
    """A program was needed that warm-up did not compile."""


class StepPrograms:
    """Builds, compiles and keeps the programs of one engine. Local (per-rank) bodies are wrapped in
    one `jax.shard_map`."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: Any,
        graphdef: nnx.GraphDef,
        params: Any,
        param_specs: Any,
        cache_specs: tuple[CacheSpec, ...],
        mesh: Mesh,
    ) -> None:
        """params: the model's state, arrays or ShapeDtypeStructs; only its structure, shapes and
        shardings are used."""
        self.config, self.model_config, self.graphdef, self.mesh = (
            config,
            model_config,
            graphdef,
            mesh,
        )
        self.cache_specs = cache_specs
        self.axes = config.axes
        leaves, self._params_tree = jax.tree.flatten(params)
        self._param_specs = tuple(jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, P)))
        self.abstract_params = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(leaves, self._param_specs, strict=True)
        )
        self.expert_groups = expert_groups(params)
        own = [group for group in self.expert_groups if group.name == OWN_EXPERTS]
        window = config.experts.window
        self.counted_shape: tuple[int, int, int] | None = (
            (window, len(own[0].layers), own[0].num_experts) if own and window else None
        )
        """(steps, layers, experts) of the counts in the decode state."""
        self.num_blocks = 0
        self.last_profiled: Any = None  # the compiled program of the memory profile
        self._compiled: dict[ProgramKey, Any] = {}
        self._registered: dict[ProgramKey, Callable[[], Any]] = {}
        self.compiles_after_warm_up = 0
        self.warm = False
        self._rank = rank_spec(self.axes)

    # ---- shapes ----------------------------------------------------------------------------------

    @property
    def has_state_caches(self) -> bool:
        return any(not isinstance(s, kv_pools.PagedCache) for s in self.cache_specs)

    @property
    def num_state_slots(self) -> int:
        """Rows of each StateCache."""
        return self.config.num_state_slots

    def prefill_seqs(self, tokens: int) -> int:
        """Most sequences a prefill bucket of `tokens` rows can hold."""
        return min(tokens, self.config.max_num_seqs)

    def layout(self, key: ProgramKey) -> PackedLayout:
        c = self.config
        match key.kind:
            case "prefill":
                return prefill_layout(key.size, self.prefill_seqs(key.size), c.max_pages)
            case "decode":
                return decode_layout(key.size)
            case "admit":
                return admit_layout(key.size, c.max_pages)
            case "update":
                return update_layout()
            case "counts":
                return counts_layout(c.runtime_max_model_len)
            case "clone_blocks" | "clone_states" | "zero_states":
                return clone_layout()
        raise ValueError(f"unknown program {key}")

    def abstract_caches(self, num_blocks: int) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        c = self.config
        return kv_pools.abstract_caches(
            self.cache_specs, self.axes, self.mesh, num_blocks, c.block_size, self.num_state_slots
        )

    def init_state(self) -> DecodeState:
        """The local state of one rank, in a trace."""
        c = self.config
        return DecodeState.init(
            c.max_num_seqs,
            c.max_pages,
            self.model_config.vocab_size,
            c.args.enable_penalties,
            None if self.counted_shape is None else ExpertCounts.init(*self.counted_shape),
        )

    def abstract_state(self) -> DecodeState:
        """All ranks' state, as ShapeDtypeStructs with shardings."""
        local = jax.eval_shape(self.init_state)
        sharding = NamedSharding(self.mesh, self._rank)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.axes.dp * x.shape[0], *x.shape[1:]), x.dtype, sharding=sharding
            ),
            local,
        )

    def allocate_state(self) -> DecodeState:
        f = jax.shard_map(
            self.init_state, mesh=self.mesh, in_specs=(), out_specs=self._rank, check_vma=False
        )
        return jax.jit(f)()

    # ---- bodies: one rank's view -----------------------------------------------------------------

    def _model(self, params: tuple[jax.Array, ...]) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self._params_tree, params))

    def _prefill(self, key: ProgramKey, params, caches: Caches, state: DecodeState, row: jax.Array):
        inputs = self.layout(key).unpack(row)
        batch = self._prefill_batch(inputs, key.size)
        model = self._model(params)
        counted = self.config.experts.counts_prefill
        hidden, caches, state = self._forward(model, caches, batch, state, counted)
        state, results = self._sample_prefill(model, hidden, state, inputs, batch)
        return caches, state, (results, self._prompt_logprobs(model, hidden, inputs))

    def _forward(
        self, model: Any, caches: Caches, batch: StepBatch, state: DecodeState, counted: bool = True
    ) -> tuple[jax.Array, Caches, DecodeState]:
        """The model's hidden states; tokens per expert go into the state where it counts them."""
        if state.experts is None or not counted:
            return *model(caches, batch), state
        hidden, caches, loads = model.forward_with_load(caches, batch)
        return hidden, caches, replace(state, experts=state.experts.add(loads))

    def _prefill_batch(self, inputs: dict[str, jax.Array], count: int) -> StepBatch:
        bs = self.config.block_size
        starts, kv_lens, tables = inputs["q_starts"], inputs["kv_lens"], inputs["block_tables"]
        rows = jnp.arange(count, dtype=jnp.int32)
        seq_ids = jnp.searchsorted(starts[1:], rows, side="right").astype(jnp.int32)
        seqs = jnp.minimum(seq_ids, kv_lens.shape[0] - 1)
        valid = seq_ids < kv_lens.shape[0]
        positions = jnp.where(valid, kv_lens[seqs] - (starts[seqs + 1] - rows), 0)
        block = tables[seqs, positions // bs]
        return StepBatch(
            tokens=inputs["tokens"],
            positions=positions,
            write_slots=jnp.where(valid, block * bs + positions % bs, self.num_blocks * bs),
            block_tables=tables,
            kv_lens=kv_lens,
            q_starts=starts,
            seq_ids=seq_ids,
            state_slots=inputs["state_slots"],
            block_size=bs,
        )

    def _sample_prefill(self, model, hidden, state: DecodeState, inputs, batch: StepBatch):
        seqs, slots, count = inputs["sample_seqs"], inputs["sample_slots"], inputs["num_samples"]
        tile = min(SAMPLE_TILE, seqs.shape[0])
        padded = -(-seqs.shape[0] // tile) * tile
        seqs, slots = (jnp.pad(x, (0, padded - x.shape[0])) for x in (seqs, slots))
        slots = jnp.where(jnp.arange(padded) < count, slots, state.num_slots)
        width = 3 + 2 * self.config.args.max_logprobs
        results = jnp.zeros((padded, width), jnp.int32)

        def one_tile(i, carry):
            state, results = carry
            at = i * tile
            seq = jax.lax.dynamic_slice_in_dim(seqs, at, tile)
            slot = jax.lax.dynamic_slice_in_dim(slots, at, tile)
            positions = batch.kv_lens[seq]
            logits = model.compute_logits(hidden[batch.q_starts[seq + 1] - 1])
            result = self._sample(logits, state.rows(slot), positions)
            state = state.append(slot, result.tokens, positions + 1)
            return state, jax.lax.dynamic_update_slice_in_dim(results, pack_result(result), at, 0)

        return jax.lax.fori_loop(0, (count + tile - 1) // tile, one_tile, (state, results))

    def _sample(
        self, logits: jax.Array, rows: SamplingState, positions: jax.Array
    ) -> sampler.SampleResult:
        return sampler.sample(
            logits,
            rows,
            positions,
            max_logprobs=self.config.args.max_logprobs,
            banned=self.config.banned_token_ids,
        )

    def _prompt_logprobs(self, model, hidden, inputs) -> jax.Array:
        """i32 [T, 3 + 2N] in the layout of `pack_result`, for the first num_prompt_logprobs rows
        asked for."""
        rows, targets, count = (
            inputs["logprob_rows"],
            inputs["logprob_targets"],
            inputs["num_prompt_logprobs"],
        )
        n = self.config.args.max_logprobs
        tile = min(SAMPLE_TILE, rows.shape[0])
        padded = -(-rows.shape[0] // tile) * tile
        rows, targets = (jnp.pad(x, (0, padded - x.shape[0])) for x in (rows, targets))

        def one_tile(i, out):
            row = jax.lax.dynamic_slice_in_dim(rows, i * tile, tile)
            target = jax.lax.dynamic_slice_in_dim(targets, i * tile, tile)
            logprobs, ranks, ids, tops = sampler.prompt_logprobs(
                model.compute_logits(hidden[row]), target, n
            )
            packed = pack_result(sampler.SampleResult(target, logprobs, ranks, ids, tops))
            return jax.lax.dynamic_update_slice_in_dim(out, packed, i * tile, 0)

        return jax.lax.fori_loop(
            0, (count + tile - 1) // tile, one_tile, jnp.zeros((padded, 3 + 2 * n), jnp.int32)
        )

    def _decode(self, key: ProgramKey, params, caches: Caches, state: DecodeState, row: jax.Array):
        inputs = self.layout(key).unpack(row)
        row_steps = inputs["row_steps"]
        state = state.update_tables(
            inputs["update_slots"], inputs["update_pages"], inputs["update_blocks"]
        )
        model = self._model(params)

        def one_step(carry, step):
            caches, state = carry
            slots = jnp.where(step < row_steps, inputs["slots"], state.num_slots)
            batch = state.decode_batch(slots, self.config.block_size, self.num_blocks)
            hidden, caches, state = self._forward(model, caches, batch, state)
            results = self._sample_decode(model.compute_logits(hidden), state, slots, batch.kv_lens)
            return (caches, state.append(slots, results[:, 0], batch.kv_lens + 1)), results

        if key.steps == 1:
            (caches, state), results = one_step((caches, state), 0)
            return caches, state, (results,)
        (caches, state), results = jax.lax.scan(one_step, (caches, state), jnp.arange(key.steps))
        return caches, state, (results.swapaxes(0, 1).reshape(key.size * key.steps, -1),)

    def _sample_decode(
        self, logits: jax.Array, state: DecodeState, slots: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """`pack_result` of all rows, at most DECODE_SAMPLE_TILE at a time; the last tile overlaps
        the one before, to the same end."""
        count = logits.shape[0]
        tile = min(count, DECODE_SAMPLE_TILE)
        tops = self.config.args.max_logprobs

        def sample(logits, slots, positions):
            return pack_result(self._sample(logits, state.rows(slots), positions))

        if tile == count:
            return sample(logits, slots, positions)

        def one_tile(i, results):
            at = jnp.minimum(i * tile, count - tile)
            rows = (jax.lax.dynamic_slice_in_dim(x, at, tile) for x in (logits, slots, positions))
            return jax.lax.dynamic_update_slice_in_dim(results, sample(*rows), at, 0)

        return jax.lax.fori_loop(
            0, -(-count // tile), one_tile, jnp.zeros((count, 3 + 2 * tops), jnp.int32)
        )

    def _admit(self, key, params, caches, state, row):
        return caches, state.admit(self.layout(key).unpack(row)), ()

    def _update(self, key, params, caches, state, row):
        inputs = self.layout(key).unpack(row)
        return (
            caches,
            state.update_tables(
                inputs["update_slots"], inputs["update_pages"], inputs["update_blocks"]
            ),
            (),
        )

    def _counts(self, key, params, caches, state, row):
        x = self.layout(key).unpack(row)
        index = jnp.arange(x["tokens"].shape[0])
        nowhere = state.num_slots
        prompt = jnp.where(index < x["num_prompt"], x["slot"], nowhere)
        output = jnp.where(
            (index >= x["num_prompt"]) & (index < x["num_tokens"]), x["slot"], nowhere
        )
        sampling = record_prompt(state.sampling, prompt, x["tokens"])
        sampling = record_outputs(sampling, output, x["tokens"])
        return (
            caches,
            replace(state, sampling=sampling),
            (),
        )

    def _clone(self, key, params, caches, state, row):
        """Copies whole blocks (or state slots): sources and targets are local ids; targets out of
        range are dropped."""
        x = self.layout(key).unpack(row)
        paged = key.kind == "clone_blocks"
        names = {s.name for s in self.cache_specs if isinstance(s, kv_pools.PagedCache) == paged}

        def copy(pool: jax.Array) -> jax.Array:
            new = (
                jnp.zeros_like(pool[x["sources"]])
                if key.kind == "zero_states"
                else pool[x["sources"]]
            )
            return pool.at[x["targets"]].set(new, mode="drop")

        return {n: tuple(map(copy, c)) if n in names else c for n, c in caches.items()}, state, ()

    # ---- compilation -----------------------------------------------------------------------------

    def function(self, key: ProgramKey) -> Callable:
        """The jitted global function of a program."""
        bodies = {
            "prefill": self._prefill,
            "decode": self._decode,
            "admit": self._admit,
            "update": self._update,
            "counts": self._counts,
            "clone_blocks": self._clone,
            "clone_states": self._clone,
            "zero_states": self._clone,
        }
        caches = kv_pools.cache_specs_tree(self.cache_specs, self.axes)
        body = partial(bodies[key.kind], key)
        mapped = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(self._param_specs, caches, self._rank, self._rank),
            out_specs=(caches, self._rank, self._rank),
            check_vma=False,
        )
        body_name = f"{key.kind}_{key.size}"
        mapped.__name__ = body_name
        options = compiler_options(self.mesh.devices.flat[0].platform)
        return jax.jit(mapped, donate_argnums=(1, 2), compiler_options=options or None)

    def lower(self, key: ProgramKey, num_blocks: int | None = None) -> Any:
        """Traces and lowers a program against abstract arguments; num_blocks overrides the pools'
        size (for profiling)."""
        if key in self._registered:
            return self._registered[key]()
        saved, self.num_blocks = (
            self.num_blocks,
            self.num_blocks if num_blocks is None else num_blocks,
        )
        try:
            row = jax.ShapeDtypeStruct(
                (self.axes.dp * self.layout(key).size,),
                jnp.int32,
                sharding=NamedSharding(self.mesh, self._rank),
            )
            args = (
                self.abstract_params,
                self.abstract_caches(self.num_blocks),
                self.abstract_state(),
                row,
            )
            return self.function(key).lower(*args)
        finally:
            self.num_blocks = saved

    def get(self, key: ProgramKey) -> Any:
        """The compiled program; compiles it now if warm-up has not (and then counts, warns or
        raises)."""
        program = self._compiled.get(key)
        if program is None:
            if self.warm:
                self.compiles_after_warm_up += 1
                if self.config.args.strict_compiles:
                    raise CompileAfterWarmUp(
                        f"program {key} was not compiled at warm-up; compiled: {self.names()}"
                    )
                logger.warning("compiling %s after warm-up: a step waits for the compiler", key)
                program = self._compiled[key] = self.lower(key).compile()
            else:
                with compile_watch().expected():
                    program = self._compiled[key] = self.lower(key).compile()
        return program

    def register(self, key: ProgramKey, lower: Callable[[], Any]) -> None:
        """Adds a program with a signature of its own: `lower` traces and lowers it. Warm-up
        compiles it with the others."""
        self._registered[key] = lower

    def missing(self, prefix: str = "") -> list[ProgramKey]:
        """Registered programs whose kind starts with `prefix` and that are not compiled yet."""
        keys = [k for k in self._registered if k.kind.startswith(prefix)]
        return [k for k in keys if k not in self._compiled]

    def put(self, key: ProgramKey, program: Any) -> None:
        self._compiled[key] = program

    def clear(self) -> None:
        self._compiled.clear()

    def names(self) -> list[str]:
        return [str(k) for k in self._compiled]

    def warm_up_keys(self) -> list[ProgramKey]:
        """Every program this role can need: its row of the bucket table."""
        c, policy = self.config, self.config.policy
        keys = [ProgramKey("prefill", t) for t in c.prefill_buckets] + list(self._registered)
        steps = sorted({1, c.args.num_decode_steps})
        keys += [ProgramKey("decode", b, k) for b in c.decode_buckets for k in steps]
        keys += [ProgramKey("admit", a) for a in ADMIT_BUCKETS]
        if policy.does_decode:
            keys.append(ProgramKey("update"))
        if c.args.enable_penalties:
            keys.append(ProgramKey("counts"))
        if policy.does_decode:
            keys.append(ProgramKey("clone_blocks"))
        if self.has_state_caches:
            keys += [ProgramKey("clone_states"), ProgramKey("zero_states")]
        return keys

    def largest_key(self) -> ProgramKey:
        """The role's largest step: what the memory profile is taken from."""
        c = self.config
        if c.policy.profiles_prefill_shape:
            return ProgramKey("prefill", c.prefill_buckets[-1])
        return ProgramKey("decode", c.decode_buckets[-1])
