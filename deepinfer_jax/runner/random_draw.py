"""One random token per row, in integers: temperature, min-p, top-k, top-p and the inverse CDF (see
sampler.py for the order and the reasons)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from deepinfer_jax.runner.sampling_state import SamplingState

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""
CANDIDATES = 64
"""Largest logits that top-k and top-p look at first; the whole vocabulary where they do not
decide."""
BLOCK = 128
"""Vocabulary entries per block of the two-level inverse CDF."""


def draw(logits: jax.Array, state: SamplingState, positions: jax.Array) -> jax.Array:
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
