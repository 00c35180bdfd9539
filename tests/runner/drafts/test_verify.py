"""Verified tokens are those of decoding one by one, whatever was drafted."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runner import sampler, sampling_state
from deepinfer_jax.runner.decode_state import DecodeState, pack_result
from deepinfer_jax.runner.drafts.verify import NOT_REACHED, verify

SLOTS, VOCAB, DRAFTS = 6, 23, 4


def logits_after(tokens: list[int]) -> np.ndarray:
    """A model: its logits depend on all tokens so far."""
    seed = np.random.SeedSequence([len(tokens), *(t + 5 for t in tokens)])
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


def start(prompts: list[list[int]], seed: int) -> DecodeState:
    """Greedy and sampled slots with every parameter somewhere; slot i holds prompts[i]."""
    state = DecodeState.init(SLOTS, 4, VOCAB, enable_penalties=True)
    rng = np.random.default_rng(seed)

    def pick(values: list, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(rng.choice(values, SLOTS), dtype)

    bias_ids = np.full(state.sampling.bias_ids.shape, -1, np.int32)
    bias_ids[:, 0] = rng.integers(0, VOCAB, SLOTS)
    eos = np.full(state.sampling.eos_ids.shape, -1, np.int32)
    eos[:, 0] = rng.integers(0, VOCAB, SLOTS)
    sampling = replace(
        state.sampling,
        temperature=pick([0.0, 0.7, 1.5]),
        top_p=pick([1.0, 0.8]),
        top_k=pick([0, 5], np.int32),
        min_p=pick([0.0, 0.1]),
        repetition_penalty=pick([1.0, 1.3]),
        presence_penalty=pick([0.0, 0.5]),
        frequency_penalty=pick([0.0, 0.7]),
        seed=jnp.asarray(rng.integers(0, 2**32, (SLOTS, 2)), jnp.uint32),
        min_len=pick([0, 9], np.int32),
        eos_ids=jnp.asarray(eos),
        bias_ids=jnp.asarray(bias_ids),
        bias_vals=jnp.full(bias_ids.shape, 1.5),
        num_logprobs=pick([-1, 2], np.int32),
    )
    for slot, prompt in enumerate(prompts):
        where = jnp.full(len(prompt), slot)
        sampling = sampling_state.record_prompt(sampling, where, jnp.asarray(prompt))
    return replace(
        state,
        last_token=jnp.asarray([p[-1] for p in prompts], jnp.int32),
        num_tokens=jnp.asarray([len(p) for p in prompts], jnp.int32),
        sampling=sampling,
    )


@jax.jit
def sample(logits, state, slots, positions):
    return pack_result(sampler.sample(logits, state.rows(slots), positions, max_logprobs=2))


def one_by_one(prompts: list[list[int]], state: DecodeState, count: int):
    """(tokens [slots][count], packed results [slots, count, W], states after each token)."""
    tokens, results, states = [list(p) for p in prompts], [], [state]
    for _ in range(count):
        logits = jnp.asarray(np.stack([logits_after(t) for t in tokens]))
        slots = jnp.arange(SLOTS)
        rows = sample(logits, state, slots, state.num_tokens)
        state = state.append(slots, rows[:, 0], state.num_tokens + 1)
        for t, token in zip(tokens, np.asarray(rows)[:, 0].tolist(), strict=True):
            t.append(token)
        results.append(np.asarray(rows))
        states.append(state)
    return [t[-count:] for t in tokens], np.stack(results, 1), states


@pytest.mark.parametrize("seed", range(8))
def test_equals_decoding_one_by_one(seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(2, 8)).tolist() for _ in range(SLOTS)]
    state = start(prompts, seed)
    want, rows, states = one_by_one(prompts, state, 1 + DRAFTS)
    drafts = np.array([w[:DRAFTS] for w in want], np.int32)
    right = rng.integers(0, DRAFTS + 1, SLOTS)  # so many drafts agree; the next one does not
    counts = rng.integers(0, DRAFTS + 1, SLOTS)
    for slot, n in enumerate(right):
        drafts[slot, n : n + 1] = (drafts[slot, n : n + 1] + 1) % VOCAB
    logits = np.stack(
        [
            [logits_after(p + drafts[i, :q].tolist()) for q in range(1 + DRAFTS)]
            for i, p in enumerate(prompts)
        ]
    )
    slots = np.arange(SLOTS)
    slots[-1] = SLOTS  # padding
    after, got = jax.jit(verify, static_argnames="sample")(
        jnp.asarray(logits), state, jnp.asarray(slots), drafts, jnp.asarray(counts), sample=sample
    )
    for slot in range(SLOTS - 1):
        reached = 1 + min(right[slot], counts[slot])
        assert np.array_equal(np.asarray(got)[slot, :reached], rows[slot, :reached])
        assert (np.asarray(got)[slot, reached:, 0] == NOT_REACHED).all()
        plain = states[reached]
        for mine, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(plain), strict=True):
            assert np.array_equal(np.asarray(mine)[slot], np.asarray(theirs)[slot], equal_nan=True)
    assert (np.asarray(got)[-1, :, 0] == NOT_REACHED).all()
    assert int(after.num_tokens[-1]) == len(prompts[-1])
