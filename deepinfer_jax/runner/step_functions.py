"""What a program computes: one rank's view of a prefill step, a decode step, and of the small
programs around them.

Each is `f(key, params, caches, state, packed inputs) -> (caches, state, results)`, to be traced
inside one `jax.shard_map`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.models.base import Caches, CacheSpec, StepBatch
from deepinfer_jax.runner import kv_pools, sampler
from deepinfer_jax.runner.decode_state import DecodeState, pack_result
from deepinfer_jax.runner.layouts import ProgramKey, layout_of
from deepinfer_jax.runner.sampling_state import SamplingState, record_outputs, record_prompt

SAMPLE_TILE = 16
"""Rows of logits computed at a time in a prefill step; the number of tiles is dynamic, so unused
rows cost nothing."""
DECODE_SAMPLE_TILE = 64
"""Rows a decode step samples at a time: the sampler's temporaries are several times its logits,
which at 256 rows of a 128k vocabulary would be the largest thing in the program and make a
COMPLETION engine's memory profile exceed a PROMPT engine's."""

type Params = tuple[jax.Array, ...]
"""The model's arrays, flattened."""
type Row = Int32[Array, " N"]
"""Inputs of a step, as `layouts` packs them."""
type StepResult = tuple[Caches, DecodeState, tuple[jax.Array, ...]]


@dataclass(frozen=True)
class StepFunctions:
    """W: words of a packed result, 3 + 2 * max_logprobs."""

    config: EngineConfig
    graphdef: nnx.GraphDef
    params_tree: jax.tree_util.PyTreeDef
    cache_specs: tuple[CacheSpec, ...]
    num_blocks: int
    """Blocks of a paged pool: slots from num_blocks * block_size on are written nowhere."""

    def _model(self, params: Params) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.params_tree, params))

    def prefill(
        self, key: ProgramKey, params: Params, caches: Caches, state: DecodeState, row: Row
    ) -> StepResult:
        inputs = layout_of(key, self.config).unpack(row)
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

    def _sample_prefill(
        self,
        model: Any,
        hidden: Float[Array, "T D"],
        state: DecodeState,
        inputs: dict[str, jax.Array],
        batch: StepBatch,
    ) -> tuple[DecodeState, Int32[Array, "S W"]]:
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
        self, logits: Float[Array, "B V"], rows: SamplingState, positions: Int32[Array, " B"]
    ) -> sampler.SampleResult:
        return sampler.sample(
            logits,
            rows,
            positions,
            max_logprobs=self.config.args.max_logprobs,
            banned=self.config.banned_token_ids,
        )

    def _prompt_logprobs(
        self, model: Any, hidden: Float[Array, "T D"], inputs: dict[str, jax.Array]
    ) -> Int32[Array, "T W"]:
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

    def decode(
        self, key: ProgramKey, params: Params, caches: Caches, state: DecodeState, row: Row
    ) -> StepResult:
        inputs = layout_of(key, self.config).unpack(row)
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
        self,
        logits: Float[Array, "B V"],
        state: DecodeState,
        slots: Int32[Array, " B"],
        positions: Int32[Array, " B"],
    ) -> Int32[Array, "B W"]:
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

    def admit(
        self, key: ProgramKey, params: Params, caches: Caches, state: DecodeState, row: Row
    ) -> StepResult:
        return caches, state.admit(layout_of(key, self.config).unpack(row)), ()

    def update(
        self, key: ProgramKey, params: Params, caches: Caches, state: DecodeState, row: Row
    ) -> StepResult:
        inputs = layout_of(key, self.config).unpack(row)
        return (
            caches,
            state.update_tables(
                inputs["update_slots"], inputs["update_pages"], inputs["update_blocks"]
            ),
            (),
        )

    def counts(
        self, key: ProgramKey, params: Params, caches: Caches, state: DecodeState, row: Row
    ) -> StepResult:
        x = layout_of(key, self.config).unpack(row)
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

    def clone(
        self, key: ProgramKey, params: Params, caches: Caches, state: DecodeState, row: Row
    ) -> StepResult:
        """Copies whole blocks (or state slots): sources and targets are local ids; targets out of
        range are dropped."""
        x = layout_of(key, self.config).unpack(row)
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
