"""On-device sampling: penalties, masks, and one counter-based random number per (seed, position).

A row's token is a function of its own logits, parameters, seed and position only. Everything whose
result could depend on the shape of the batch is integer arithmetic: probabilities are scaled to
uint32 (total about 2**31), so sums are exact in any order, and the inverse CDF compares integers.
Neither a row's place in the batch nor its neighbours change it.

Order of operations: logit_bias -> min_tokens ban -> repetition, presence, frequency penalties ->
temperature -> min-p -> top-k -> top-p -> draw, the order of vLLM, whose names the parameters have.
Each step sees what the one before has left: top-p is a share of the mass that min-p and top-k keep.
Log-probabilities and ranks describe the *raw* model
distribution: log-softmax of the logits as they came in, before all of the above (the same meaning
as vLLM's default `raw_logprobs`).

No step sorts the vocabulary: a full sort costs tens of milliseconds per row on CPU. The k-th
largest value and the edge of the nucleus are found by bisecting on the bits of the float32 order
(32 counting passes), over the `CANDIDATES` largest logits where those decide every row of the
batch, over the whole vocabulary otherwise; both give the same bits. Each feature sits under
`lax.cond`, so a batch in which no row asks for it does not pay for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.runner.random_draw import GREEDY_TEMPERATURE, draw
from deepinfer_jax.runner.sampling_state import SamplingState, drop_negative

ERROR_TOKEN = -1
"""The token of a row whose logits held NaN or +inf, or of which nothing was left to choose."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleResult:
    """What `sample` returns for R rows. Log-probabilities are natural logs of the raw model
    distribution.

    Rows that asked for no log-probabilities, and entries past a row's own num_logprobs, hold NaN /
    rank 0 / id -1.
    """

    tokens: jax.Array  # i32 [R]; ERROR_TOKEN: see there
    logprobs: jax.Array  # f32 [R]
    ranks: jax.Array  # i32 [R]; 1 = most likely; ties rank by id
    top_ids: jax.Array  # i32 [R, N]
    top_logprobs: jax.Array  # f32 [R, N]


def sample(
    logits: jax.Array,
    state: SamplingState,
    positions: jax.Array,
    *,
    max_logprobs: int,
    banned: tuple[int, ...] = (),
) -> SampleResult:
    """Chooses one token per row.

    logits f32 [R, V]; state: R rows (see `gather_rows`); positions i32 [R]: the position in its
    sequence of the token to be chosen (the number of tokens before it); max_logprobs: static width
    N of the top log-probabilities; banned: static ids that are never chosen.
    """
    raw = logits = logits.astype(jnp.float32)
    if banned:
        logits = logits.at[:, jnp.array(banned)].set(-jnp.inf)
    # The plain greedy token is computed outside the cond: XLA:CPU runs the inside of a cond on one
    # thread.
    tokens = lax.cond(
        _any_processing(state, positions) | jnp.any(_random_rows(state)),
        lambda greedy: _choose(_process(logits, state, positions), state, positions),
        lambda greedy: greedy,
        _greedy(logits),
    )
    return SampleResult(tokens, *_logprobs(raw, tokens, state.num_logprobs, max_logprobs))


def _greedy(logits: jax.Array) -> jax.Array:
    """i32 [R]: the most likely token of each row, the lowest id among equals, ERROR_TOKEN where the
    logits are broken."""
    peak = jnp.max(logits, axis=-1)
    # A vectorised max may lose a NaN (seen on CPU), hence the second test; a peak of -inf: every
    # token is banned.
    broken = ~jnp.isfinite(peak) | jnp.any(jnp.isnan(logits), axis=-1)
    # The lowest id at the peak; jnp.argmax is 4 to 15 times slower on CPU.
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.min(jnp.where(logits == peak[:, None], ids, logits.shape[1]), axis=-1)
    return jnp.where(broken, ERROR_TOKEN, first)


def _choose(logits: jax.Array, state: SamplingState, positions: jax.Array) -> jax.Array:
    """i32 [R]: the greedy or drawn token of each row of processed logits, or ERROR_TOKEN."""
    greedy = _greedy(logits)
    drawn = _random_rows(state) & (greedy != ERROR_TOKEN)
    return lax.cond(
        jnp.any(drawn),
        lambda: jnp.where(drawn, draw(logits, state, positions), greedy),
        lambda: greedy,
    )


def _random_rows(state: SamplingState) -> jax.Array:
    return state.temperature >= GREEDY_TEMPERATURE


def prompt_logprobs(
    logits: jax.Array, targets: jax.Array, num: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of given tokens: logits f32 [R, V], targets i32 [R], static num.

    Returns (logprobs f32 [R], ranks i32 [R], top_ids i32 [R, num], top_logprobs f32 [R, num]).
    """
    logits = logits.astype(jnp.float32)
    norm = jax.nn.logsumexp(logits, axis=-1)
    value = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    ahead = (logits > value) | ((logits == value) & (ids < targets[:, None]))
    ranks = 1 + jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    if num == 0:
        empty = jnp.zeros((logits.shape[0], 0))
        return value[:, 0] - norm, ranks, empty.astype(jnp.int32), empty
    top_values, top_ids = lax.top_k(logits, num)
    return value[:, 0] - norm, ranks, top_ids, top_values - norm[:, None]


def _logprobs(
    logits: jax.Array, tokens: jax.Array, wanted: jax.Array, num: int
) -> tuple[jax.Array, ...]:
    rows = logits.shape[0]
    nothing = (
        jnp.full(rows, jnp.nan),
        jnp.zeros(rows, jnp.int32),
        jnp.full((rows, num), -1, jnp.int32),
        jnp.full((rows, num), jnp.nan),
    )

    def compute():
        values = prompt_logprobs(logits, tokens, num)
        on = (wanted >= 0) & (tokens >= 0)
        keep = on[:, None] & (jnp.arange(num) < wanted[:, None])
        return tuple(
            jnp.where(m, v, n)
            for m, v, n in zip((on, on, keep, keep), values, nothing, strict=True)
        )

    return lax.cond(jnp.any(wanted >= 0), compute, lambda: nothing)


def _banned(state: SamplingState, positions: jax.Array) -> jax.Array:
    return (positions < state.min_len)[:, None] & (state.eos_ids >= 0)


def _penalised(state: SamplingState) -> jax.Array:
    return (
        (state.repetition_penalty != 1)
        | (state.presence_penalty != 0)
        | (state.frequency_penalty != 0)
    )


def _any_processing(state: SamplingState, positions: jax.Array) -> jax.Array:
    wanted = jnp.any(state.bias_ids >= 0) | jnp.any(_banned(state, positions))
    return wanted if state.output_counts is None else wanted | jnp.any(_penalised(state))


def _process(logits: jax.Array, state: SamplingState, positions: jax.Array) -> jax.Array:
    """Bias, min_tokens ban and penalties."""
    rows, vocab = logits.shape
    index = jnp.arange(rows)[:, None]
    logits = logits.at[index, drop_negative(state.bias_ids, vocab)].add(
        state.bias_vals, mode="drop"
    )
    banned = jnp.where(_banned(state, positions), state.eos_ids, vocab)
    logits = logits.at[index, banned].set(-jnp.inf, mode="drop")
    if state.output_counts is None:
        return logits
    return lax.cond(jnp.any(_penalised(state)), lambda x: _penalise(x, state), lambda x: x, logits)


def _penalise(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Repetition (CTRL, arXiv:1909.05858 section 4.1, as Hugging Face applies it: prompt and
    output), then the OpenAI API's frequency (per occurrence) and presence (once) penalties on
    generated tokens."""
    counts, seen = state.output_counts, state.prompt_mask
    if state.count_rows is not None:
        counts = jnp.take(counts, state.count_rows, axis=0, mode="clip")
        seen = jnp.take(seen, state.count_rows, axis=0, mode="clip")
    repeated = jnp.where(seen | (counts > 0), state.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repeated, logits * repeated)
    logits -= state.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - state.presence_penalty[:, None] * (counts > 0)
