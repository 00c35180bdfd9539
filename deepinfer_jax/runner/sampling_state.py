"""Sampling parameters on the device, one row per slot, and the token counts that penalties need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters, one row per slot (or per row to sample, after `gather_rows`)."""

    temperature: jax.Array  # f32 [S]; below GREEDY_TEMPERATURE: greedy
    top_p: jax.Array  # f32 [S]; >= 1: off
    top_k: jax.Array  # i32 [S]; <= 0: off
    min_p: jax.Array  # f32 [S]; <= 0: off
    repetition_penalty: jax.Array  # f32 [S]; 1: off
    presence_penalty: jax.Array  # f32 [S]; 0: off
    frequency_penalty: jax.Array  # f32 [S]; 0: off
    seed: jax.Array  # u32 [S, 2]
    min_len: (
        jax.Array
    )  # i32 [S]; prompt_len + min_tokens: eos_ids are banned at positions below this; 0: off
    eos_ids: jax.Array  # i32 [S, E]; the ids min_tokens bans (EOS and stop ids); -1: padding
    bias_ids: jax.Array  # i32 [S, B]; -1: padding
    bias_vals: jax.Array  # f32 [S, B]
    num_logprobs: jax.Array  # i32 [S]; -1: none; 0: the sampled token's only; n: and the n largest
    prompt_len: jax.Array  # i32 [S]
    output_counts: jax.Array | None = (
        None  # i32 [slots, V]: how often each token was generated; None: penalties disabled
    )
    prompt_mask: jax.Array | None = None  # bool [slots, V]: tokens of the prompt
    count_rows: jax.Array | None = (
        None  # i32 [S]: row of the two tables above for each row here; None: the same row
    )


def init_state(
    num_slots: int, vocab_size: int, *, max_eos_ids: int, max_bias: int, enable_penalties: bool
) -> SamplingState:
    """A state in which every slot is greedy with everything else off. The [slots, V] tables exist
    only with penalties."""
    f32, i32 = jnp.float32, jnp.int32
    return SamplingState(
        temperature=jnp.zeros(num_slots, f32),
        top_p=jnp.ones(num_slots, f32),
        top_k=jnp.zeros(num_slots, i32),
        min_p=jnp.zeros(num_slots, f32),
        repetition_penalty=jnp.ones(num_slots, f32),
        presence_penalty=jnp.zeros(num_slots, f32),
        frequency_penalty=jnp.zeros(num_slots, f32),
        seed=jnp.zeros((num_slots, 2), jnp.uint32),
        min_len=jnp.zeros(num_slots, i32),
        eos_ids=jnp.full((num_slots, max_eos_ids), -1, i32),
        bias_ids=jnp.full((num_slots, max_bias), -1, i32),
        bias_vals=jnp.zeros((num_slots, max_bias), f32),
        num_logprobs=jnp.full(num_slots, -1, i32),
        prompt_len=jnp.zeros(num_slots, i32),
        output_counts=jnp.zeros((num_slots, vocab_size), i32) if enable_penalties else None,
        prompt_mask=jnp.zeros((num_slots, vocab_size), bool) if enable_penalties else None,
    )


def _map_params(
    f: Callable[..., jax.Array], state: SamplingState, *others: SamplingState
) -> SamplingState:
    """Applies f to the per-row parameters, leaving the [slots, V] tables of `state` alone."""
    bare = [
        replace(s, output_counts=None, prompt_mask=None, count_rows=None) for s in (state, *others)
    ]
    return replace(
        jax.tree.map(f, *bare), output_counts=state.output_counts, prompt_mask=state.prompt_mask
    )


def gather_rows(state: SamplingState, slots: jax.Array) -> SamplingState:
    """The rows `slots` i32 [R] of a per-slot state. The [slots, V] tables are not copied:
    `count_rows` points into them."""
    rows = _map_params(lambda a: jnp.take(a, slots, axis=0, mode="clip"), state)
    return replace(rows, count_rows=slots if state.output_counts is not None else None)


def scatter_rows(state: SamplingState, slots: jax.Array, rows: SamplingState) -> SamplingState:
    """Writes the parameters of `rows` at `slots` i32 [R] (out-of-range slots are dropped) and
    clears those slots' tables."""
    slots = drop_negative(slots, state.temperature.shape[0])
    out = _map_params(lambda a, b: a.at[slots].set(b, mode="drop"), state, rows)
    if state.output_counts is None:
        return out
    return replace(
        out,
        output_counts=state.output_counts.at[slots].set(0, mode="drop"),
        prompt_mask=state.prompt_mask.at[slots].set(False, mode="drop"),
    )


def record_prompt(state: SamplingState, slots: jax.Array, tokens: jax.Array) -> SamplingState:
    """Marks `tokens` i32 [T] as prompt tokens of `slots` i32 [T]; out-of-range or negative pairs
    are dropped."""
    if state.prompt_mask is None:
        return state
    slots, tokens = _drop_pairs(state.prompt_mask, slots, tokens)
    return replace(state, prompt_mask=state.prompt_mask.at[slots, tokens].set(True, mode="drop"))


def record_outputs(state: SamplingState, slots: jax.Array, tokens: jax.Array) -> SamplingState:
    """Counts generated `tokens` i32 [R] of `slots` i32 [R]; out-of-range or negative pairs
    (ERROR_TOKEN) are dropped."""
    if state.output_counts is None:
        return state
    slots, tokens = _drop_pairs(state.output_counts, slots, tokens)
    return replace(state, output_counts=state.output_counts.at[slots, tokens].add(1, mode="drop"))


def drop_negative(index: jax.Array, size: int) -> jax.Array:
    """Negative indices count from the end in `.at[]`; send them out of range, where mode="drop"
    drops them."""
    return jnp.where(index < 0, size, index)


def _drop_pairs(table: jax.Array, rows: jax.Array, cols: jax.Array) -> tuple[jax.Array, jax.Array]:
    return drop_negative(rows, table.shape[0]), drop_negative(cols, table.shape[1])
