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

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""
CANDIDATES = 64
BLOCK = 128
"""Vocabulary entries per block of the two-level inverse CDF."""
ERROR_TOKEN = -1
"""The token of a row whose logits held NaN or +inf, or of which nothing was left to choose."""


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


# ---- state ---------------------------------------------------------------------------------------


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


def _map_params(f, state: SamplingState, *others: SamplingState) -> SamplingState:
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
    slots = _drop_negative(slots, state.temperature.shape[0])
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


def _drop_negative(index: jax.Array, size: int) -> jax.Array:
    """Negative indices count from the end in `.at[]`; send them out of range, where mode="drop"
    drops them."""
    return jnp.where(index < 0, size, index)


def _drop_pairs(table: jax.Array, rows: jax.Array, cols: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _drop_negative(rows, table.shape[0]), _drop_negative(cols, table.shape[1])


# ---- sampling ------------------------------------------------------------------------------------


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
    draw = _random_rows(state) & (greedy != ERROR_TOKEN)
    return lax.cond(
        jnp.any(draw),
        lambda: jnp.where(draw, _draw(logits, state, positions), greedy),
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
    logits = logits.at[index, _drop_negative(state.bias_ids, vocab)].add(
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


# ---- the random draw -----------------------------------------------------------------------------


def _draw(logits: jax.Array, state: SamplingState, positions: jax.Array) -> jax.Array:
    """Inverse CDF over the kept tokens, in id order, in integers."""
    vocab = logits.shape[1]
    mass, weights = _fixed_point(logits, state.temperature)
    top_k = jnp.where((state.top_k > 0) & (state.top_k < vocab), state.top_k, vocab)
    cut_k, cut_p, cut_min = (
        jnp.any(top_k < vocab),
        jnp.any(state.top_p < 1),
        jnp.any(state.min_p > 0),
    )

    def restrict(mass):
        # weights are relative to the most likely token, which is what min-p compares with
        # (arXiv:2407.01082). The tokens it drops are the least likely, so the k largest of all
        # are the k largest of the rest.
        mass = jnp.where(weights >= state.min_p[:, None], mass, 0)
        keys = lax.optimization_barrier(_order_key(logits))
        best = lax.top_k(logits, min(CANDIDATES, vocab))[1]
        mass = lax.cond(cut_k, lambda m: _keep_top_k(m, keys, best, top_k), lambda m: m, mass)
        return lax.cond(cut_p, lambda m: _keep_top_p(m, keys, best, state.top_p), lambda m: m, mass)

    def finish(mass):
        blocks = _blocks(mass)
        ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
        zero = jnp.zeros(mass.shape[0], jnp.uint32)
        random = threefry2x32_p.bind(
            state.seed[:, 0], state.seed[:, 1], positions.astype(jnp.uint32), zero
        )
        return _locate(blocks, ends, _scale_down(*random, ends[:, -1]))

    return lax.cond(cut_k | cut_p | cut_min, lambda m: finish(restrict(m)), finish, mass)


def _fixed_point(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(softmax(logits / temperature) as u32 [R, V] with a total of 2**31 up to rounding,
    exp((logits - peak) / temperature)).

    The normaliser is itself summed in integers, so that it does not depend on the order of
    summation.
    """
    peak = jnp.max(logits, axis=-1, keepdims=True)
    temperature = jnp.where(temperature >= GREEDY_TEMPERATURE, temperature, 1.0)
    # Materialised once, like the mass: recomputing in another fusion might round differently, and
    # sums must agree.
    weights = lax.optimization_barrier(jnp.exp((logits - peak) / temperature[:, None]))
    sums = jnp.sum(_blocks(_round_to_u32(weights * 2.0**24)), axis=-1)
    high, low = jnp.sum(sums >> 16, axis=-1), jnp.sum(sums & 0xFFFF, axis=-1)
    scale = 2.0**55 / (high.astype(jnp.float32) * 65536.0 + low.astype(jnp.float32))
    return lax.optimization_barrier(_round_to_u32(weights * scale[:, None])), weights


def _round_to_u32(values: jax.Array) -> jax.Array:
    return jnp.round(values).astype(jnp.uint32)


def _blocks(values: jax.Array) -> jax.Array:
    """[R, V] -> [R, ceil(V / BLOCK), BLOCK], padded with zeros."""
    pad = -values.shape[1] % BLOCK
    values = jnp.pad(values, ((0, 0), (0, pad))) if pad else values
    return values.reshape(values.shape[0], -1, BLOCK)


def _locate(blocks: jax.Array, ends: jax.Array, target: jax.Array) -> jax.Array:
    """The index i with sum(mass[:i]) <= target < sum(mass[:i + 1]), for mass u32 in blocks and
    their running sums `ends`."""
    block = jnp.sum(ends <= target[:, None], axis=-1)
    before = jnp.where(
        block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0], 0
    )
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1, mode="clip")[:, 0]
    offset = jnp.sum(jnp.cumsum(inside, axis=-1) <= (target - before)[:, None], axis=-1)
    return (block * BLOCK + offset).astype(jnp.int32)


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two u32 arrays."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & 0xFFFF)) >> 16)


def _scale_down(high: jax.Array, low: jax.Array, total: jax.Array) -> jax.Array:
    """floor((high * 2**32 + low) / 2**64 * total): uniform in [0, total)."""
    product = high * total
    carry = (product + _multiply_high(low, total) < product).astype(jnp.uint32)
    return _multiply_high(high, total) + carry


# ---- top-k and top-p -----------------------------------------------------------------------------


def _order_key(values: jax.Array) -> jax.Array:
    """u32 keys in the order of the float32 values (-0 and +0 alike)."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(keys: jax.Array, amounts: jax.Array | None, wanted: jax.Array) -> jax.Array:
    """The largest t [R] for which the amounts (None: 1 each) at keys >= t add up to at least wanted
    u32 [R]."""

    def set_bit(i, threshold):
        trial = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        inside = keys >= trial[:, None]
        reached = (
            jnp.sum(inside, axis=-1, dtype=jnp.uint32)
            if amounts is None
            else jnp.sum(jnp.where(inside, amounts, 0), axis=-1)
        )
        return jnp.where(reached >= wanted, trial, threshold)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def _cut(mass: jax.Array, keys: jax.Array, threshold: jax.Array, num_ties: jax.Array) -> jax.Array:
    """Zeroes the mass below the threshold and, of the keys equal to it, all but the num_ties lowest
    ids."""
    ties = keys == threshold[:, None]

    def split(_):
        blocks = _blocks(ties.astype(jnp.uint32))
        last = _locate(blocks, jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1), num_ties - 1)
        return ties & (lax.broadcasted_iota(jnp.int32, keys.shape, 1) <= last[:, None])

    unsplit = jnp.all(jnp.sum(ties, axis=-1, dtype=jnp.uint32) <= num_ties)
    ties = lax.cond(unsplit, lambda t: t, split, ties)
    return jnp.where((keys > threshold[:, None]) | ties, mass, 0)


def _keep_top_k(mass: jax.Array, keys: jax.Array, best: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keeps the top_k [R] (1..V; V: all) largest keys, the lower id first among equals. best [R,
    C]: ids of the largest."""
    vocab = keys.shape[1]
    wanted = top_k.astype(jnp.uint32)

    def search(keys):
        threshold = _largest_threshold(keys, None, wanted)
        return threshold, wanted - jnp.sum(keys > threshold[:, None], axis=-1, dtype=jnp.uint32)

    off = top_k == vocab
    small = jnp.all((top_k <= best.shape[1]) | off)
    threshold, num_ties = lax.cond(
        small, lambda: search(jnp.take_along_axis(keys, best, axis=-1)), lambda: search(keys)
    )
    return _cut(mass, keys, jnp.where(off, 0, threshold), jnp.where(off, vocab, num_ties))


def _keep_top_p(mass: jax.Array, keys: jax.Array, best: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the nucleus: the fewest largest tokens with mass >= top_p of the total
    (arXiv:1904.09751, section 3.1).

    Equivalently, a token stays while the mass ahead of it (larger, or equal with a lower id) is
    below top_p.
    """
    on = top_p < 1
    wanted = jnp.where(on, jnp.maximum(_fraction(top_p, jnp.sum(mass, axis=-1)), 1), 0)

    def search(keys, mass):
        threshold = _largest_threshold(keys, mass, wanted)
        above = jnp.sum(jnp.where(keys > threshold[:, None], mass, 0), axis=-1)
        one = jnp.max(jnp.where(keys == threshold[:, None], mass, 0), axis=-1)
        return threshold, (wanted - above + one - 1) // jnp.maximum(one, 1)

    best_keys, best_mass = (jnp.take_along_axis(x, best, axis=-1) for x in (keys, mass))
    sure = jnp.all(jnp.sum(best_mass, axis=-1) >= wanted)
    threshold, num_ties = lax.cond(
        sure, lambda: search(best_keys, best_mass), lambda: search(keys, mass)
    )
    return jnp.where(on[:, None], _cut(mass, keys, threshold, num_ties), mass)


def _fraction(share: jax.Array, total: jax.Array) -> jax.Array:
    """ceil(share * total), exactly, for share f32 [R] in [0, 1) and total u32 [R]."""
    fixed = (jnp.clip(share, 0.0, 1.0 - 2.0**-24) * 2.0**32).astype(jnp.uint32)
    return _multiply_high(fixed, total) + (fixed * total != 0)
