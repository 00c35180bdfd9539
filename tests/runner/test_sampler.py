"""The sampler against a float64 NumPy oracle that sorts, normalises and draws the plain way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runner import random_draw, sampler, sampling_state
from deepinfer_jax.runner.sampler import ERROR_TOKEN, prompt_logprobs, sample
from deepinfer_jax.runner.sampling_state import SamplingState, gather_rows, init_state

FIELDS = {
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int32,
    "min_p": np.float32,
    "min_len": np.int32,
}
FIELDS |= {f"{n}_penalty": np.float32 for n in ("repetition", "presence", "frequency")} | {
    "num_logprobs": np.int32
}

jit_sample = jax.jit(sample, static_argnames="max_logprobs")


def make_state(
    rows: int, vocab: int, *, seed=None, eos=None, bias=None, penalties=False, **params
) -> SamplingState:
    """A state whose parameters are given as scalars or lists; seed: u32 [rows, 2]; bias: (ids,
    values)."""
    state = init_state(rows, vocab, max_eos_ids=2, max_bias=3, enable_penalties=penalties)
    arrays = {
        k: jnp.asarray(np.broadcast_to(np.asarray(v, FIELDS[k]), (rows,)))
        for k, v in params.items()
    }
    if seed is None:
        seed = np.stack([np.arange(rows), np.full(rows, 7)], axis=1)
    arrays["seed"] = jnp.asarray(seed, jnp.uint32)
    if eos is not None:
        arrays["eos_ids"] = jnp.asarray(eos, jnp.int32)
    if bias is not None:
        arrays["bias_ids"], arrays["bias_vals"] = (
            jnp.asarray(bias[0], jnp.int32),
            jnp.asarray(bias[1], jnp.float32),
        )
    return replace(state, **arrays)


def run(logits, state, positions=None, max_logprobs=0):
    logits = np.asarray(logits, np.float32)
    positions = (
        np.zeros(len(logits), np.int32) if positions is None else np.asarray(positions, np.int32)
    )
    return jax.tree.map(np.asarray, jit_sample(logits, state, positions, max_logprobs=max_logprobs))


# ---- the oracle ----------------------------------------------------------------------------------


def oracle_probs(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """float64 probabilities of one row after min-p, top-k and top-p, by a stable sort."""
    x = np.asarray(logits, np.float64)
    order = np.argsort(-x, kind="stable")
    p = np.exp((x - x.max()) / temperature)
    p[p < min_p] = 0
    if top_k > 0:
        p[order[top_k:]] = 0
    p /= p.sum()
    ahead = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[(ahead >= max(top_p, 1e-12)) & (np.arange(len(x)) > 0)]] = 0
    return p / p.sum()


def threefry2x32(key, counter):
    """Threefry-2x32-20 (Salmon et al. 2011), in Python integers."""
    mask, k = 0xFFFFFFFF, [int(key[0]), int(key[1])]
    k.append(k[0] ^ k[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + k[0]) & mask, (counter[1] + k[1]) & mask
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a = (a + b) & mask
            b = ((b << r | b >> (32 - r)) & mask) ^ a
        a, b = (a + k[(block + 1) % 3]) & mask, (b + k[(block + 2) % 3] + block + 1) & mask
    return a, b


def uniform(seed, position) -> float:
    high, low = threefry2x32(seed, (position, 0))
    return (high * 2**32 + low) / 2**64


def support(logits, state_params, draws=3000) -> set[int]:
    """The ids drawn for one row of logits at many positions (rows of one batch)."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (draws, len(logits)))
    state = make_state(draws, logits.shape[1], temperature=1.0, **state_params)
    return set(run(logits, state).tokens.tolist())


# ---- draws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [7, 128, 1000, 49152, 130_001])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.7, "min_p": 0.02}]
)
def test_tokens_equal_the_inverse_cdf_of_the_oracle(vocab, params):
    rows, rng = 12, np.random.default_rng(vocab)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    positions = rng.integers(0, 10_000, rows)
    seeds = rng.integers(0, 2**32, (rows, 2))
    tokens = run(
        logits, make_state(rows, vocab, seed=seeds, temperature=0.9, **params), positions
    ).tokens
    for row in range(rows):
        p = oracle_probs(logits[row], temperature=np.float64(np.float32(0.9)), **params)
        ends, u = np.cumsum(p), uniform(seeds[row], int(positions[row]))
        expected = int(np.searchsorted(ends, u, side="right"))
        if tokens[row] != expected:  # rounding of 2**-24 may move the edge that u fell on
            low, high = sorted((int(tokens[row]), expected))
            assert p[tokens[row]] > 0 and np.abs(ends[low:high] - u).max() < 2e-6


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}],
)
def test_goodness_of_fit(params):
    vocab, draws, rng = 40, 20_000, np.random.default_rng(0)
    logits = rng.normal(size=vocab).astype(np.float32) * 2
    params = {"temperature": 1.0} | params
    seeds = np.stack([np.full(draws, 11), np.arange(draws) // 100], axis=1)
    state = make_state(draws, vocab, seed=seeds, **params)
    tokens = run(np.broadcast_to(logits, (draws, vocab)), state, np.arange(draws) % 100).tokens
    expected = oracle_probs(logits, **params) * draws
    observed = np.bincount(tokens, minlength=vocab)
    assert not observed[expected == 0].any()
    kept = expected > 5
    chi2 = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert (
        chi2 < degrees + 4.5 * np.sqrt(2 * degrees) + 5
    )  # about one in 10**5 for a correct sampler


def test_exact_support_with_ties():
    tied = np.array([1, 3, 3, 2, 3, 2, 0, 2], np.float32)
    assert support(tied, {"top_k": 1}) == {1}
    assert support(tied, {"top_k": 2}) == {1, 2}
    assert support(tied, {"top_k": 4}) == {1, 2, 3, 4}
    assert support(tied, {"top_k": 5}) == {1, 2, 3, 4, 5}
    assert (
        support(tied, {"top_k": 8})
        == support(tied, {"top_k": 0})
        == support(tied, {"top_k": -1})
        == set(range(8))
    )
    four = np.zeros(4, np.float32)  # a quarter each
    assert support(four, {"top_p": 0.5}) == {0, 1}
    assert support(four, {"top_p": 0.5001}) == {0, 1, 2}
    assert support(four, {"top_p": 0.0}) == {0}
    assert support(four, {"top_k": 2, "top_p": 0.5}) == {0}  # top-p acts on what top-k renormalised
    assert support(np.log([8, 4, 2, 1]), {"min_p": 0.24}) == {0, 1, 2}
    assert support(np.array([0.0, -0.0, -1]), {"top_k": 1}) == {0}


def test_min_p_keeps_what_is_exactly_on_its_limit():
    """min_p=1: those as likely as the most likely one, itself included."""
    assert support([2.0, 1.0, 2.0, 0.0], {"min_p": 1.0}) == {0, 2}


def test_min_p_comes_before_top_k_and_top_p():
    """Probabilities .5 .2 .1 .1 .1: min_p=.3 leaves .714 and .286, of which top_p=.7 keeps one."""
    logits = np.log([0.5, 0.2, 0.1, 0.1, 0.1])
    assert support(logits, {"min_p": 0.3, "top_p": 0.7}) == {0}
    assert support(logits, {"min_p": 0.3, "top_p": 0.72}) == {0, 1}
    assert support(logits, {"min_p": 0.25, "top_k": 4, "top_p": 0.999}) == {0, 1}
    assert support(logits, {"top_k": 1, "min_p": 0.1}) == {0}


def test_bias_comes_before_penalties():
    """The penalty halves the biased logit (1 + 30) / 2, so that the other one (20) wins."""
    state = make_state(
        1, 4, penalties=True, repetition_penalty=2.0, bias=([[0, 1, -1]], [[30.0, 19.0, 0.0]])
    )
    state = sampling_state.record_prompt(state, jnp.array([0]), jnp.array([0]))
    assert run([[1.0, 1.0, 1.0, 1.0]], gather_rows(state, jnp.array([0]))).tokens.tolist() == [1]


@pytest.mark.parametrize("wide", [False, True], ids=["candidates", "vocabulary"])
def test_supports_are_the_oracles_on_both_search_paths(wide):
    """Flat rows need the whole-vocabulary search, peaked rows the candidates; one row of the other
    kind must not matter."""
    rng, vocab, rows = np.random.default_rng(3), 3000, 8
    values = np.round(rng.normal(size=(rows, vocab)) * (0.5 if wide else 4), 1).astype(
        np.float32
    )  # rounding makes ties
    for top_k, top_p in ((40, 1.0), (0, 0.9), (300, 1.0), (300, 0.5)):
        mass, _ = jax.jit(random_draw._fixed_point)(values, jnp.ones(rows))
        keys, best = (
            random_draw._order_key(values),
            jax.lax.top_k(values, random_draw.CANDIDATES)[1],
        )
        k = jnp.full(rows, top_k if top_k else vocab)
        kept = random_draw._keep_top_p(
            random_draw._keep_top_k(mass, keys, best, k),
            keys,
            best,
            jnp.full(rows, top_p, jnp.float32),
        )
        for row in range(rows):
            expected = oracle_probs(values[row], top_k=top_k, top_p=float(np.float32(top_p))) > 0
            np.testing.assert_array_equal(
                np.asarray(kept[row]) > 0, expected & (np.asarray(mass[row]) > 0)
            )


def test_a_row_does_not_depend_on_its_batch():
    vocab, rows, rng = 1153, 17, np.random.default_rng(1)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 2
    params = {
        "temperature": rng.choice([0.0, 0.6, 1.0, 1.7], rows),
        "top_k": rng.choice([0, 3, 200], rows),
        "top_p": rng.choice([1.0, 0.9, 0.3], rows),
        "min_p": rng.choice([0.0, 0.05], rows),
        "num_logprobs": rng.choice([-1, 0, 2], rows),
    }
    state, positions = make_state(rows, vocab, **params), rng.integers(0, 99, rows).astype(np.int32)
    together = run(logits, state, positions, max_logprobs=2)
    for order in (
        rng.permutation(rows),
        np.arange(rows)[::-1],
        np.arange(3),
        *np.arange(rows)[:, None],
    ):
        picked = run(
            logits[order], gather_rows(state, jnp.asarray(order)), positions[order], max_logprobs=2
        )
        np.testing.assert_array_equal(picked.tokens, together.tokens[order])
        np.testing.assert_array_equal(picked.ranks, together.ranks[order])
        np.testing.assert_array_equal(picked.top_ids, together.top_ids[order])
        np.testing.assert_allclose(picked.logprobs, together.logprobs[order], rtol=1e-5)


def test_seed_and_position_make_the_draw():
    logits = np.zeros((4, 50_000), np.float32)
    draw = partial(run, logits)
    state = make_state(4, 50_000, temperature=1.0, seed=[[1, 2], [1, 2], [1, 3], [2, 2]])
    first = draw(state, [5, 5, 5, 5]).tokens
    assert first[0] == first[1] and len(set(first.tolist())) == 3
    np.testing.assert_array_equal(first, draw(state, [5, 5, 5, 5]).tokens)
    assert (draw(state, [6, 6, 6, 6]).tokens != first).all()


def test_greedy_takes_the_lowest_of_equals():
    logits = np.array([[0, 2, 2, 1], [-5, -5, -5, -5], [0, 0, 0, 9]], np.float32)
    assert run(logits, make_state(3, 4)).tokens.tolist() == [1, 0, 3]
    mixed = make_state(3, 4, temperature=[0, 9e-6, 1.0], top_k=[4, 4, 1])
    assert run(logits, mixed).tokens.tolist() == [1, 0, 3]


def test_extreme_logits():
    logits = np.full((3, 300), -1e30, np.float32)
    logits[0, 17], logits[1, 33], logits[2] = 1e30, 0, -np.inf
    logits[2, 299] = -3e38
    for temperature in (0.0, 2e-5, 1.0, 100.0):
        assert run(
            logits, make_state(3, 300, temperature=temperature, top_p=0.999)
        ).tokens.tolist() == [17, 33, 299]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [16, 49152])
def test_broken_logits_are_flagged(temperature, vocab):
    logits = np.random.default_rng(0).normal(size=(5, vocab)).astype(np.float32)
    logits[0, vocab // 2], logits[1, vocab - 1], logits[2], logits[3] = (
        np.nan,
        np.inf,
        -np.inf,
        np.nan,
    )
    result = run(
        logits,
        make_state(5, vocab, temperature=temperature, top_p=0.9, num_logprobs=1),
        max_logprobs=1,
    )
    assert (result.tokens[:4] == ERROR_TOKEN).all() and 0 <= result.tokens[4] < vocab
    assert np.isnan(result.logprobs[:4]).all() and np.isfinite(result.logprobs[4])


# ---- what is done to the logits ------------------------------------------------------------------


def test_penalties_have_the_published_values():
    vocab, slots = 6, 4
    logits = np.array([[2.0, -2.0, 1.0, 0.5, -1.0, 3.0]], np.float32)
    state = make_state(
        slots,
        vocab,
        penalties=True,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    state = sampling_state.record_prompt(
        state, jnp.array([2, 2, 2, 9, 2]), jnp.array([0, 1, 1, 3, -1])
    )
    for tokens in ([1, 2], [2, 2], [5, -1]):
        state = sampling_state.record_outputs(state, jnp.array([2, 2]), jnp.array(tokens))
    processed = sampler._process(
        jnp.asarray(logits), gather_rows(state, jnp.array([2])), jnp.array([9])
    )
    # prompt: 0, 1, 1; output: 1, 2, 2, 2, 5
    expected = [
        2 / 1.5,
        -2 * 1.5 - 0.5 - 0.25,
        1 / 1.5 - 1.5 - 0.25,
        0.5,
        -1.0,
        3 / 1.5 - 0.5 - 0.25,
    ]
    np.testing.assert_allclose(processed[0], expected, rtol=1e-6)
    untouched = sampler._process(
        jnp.asarray(logits), gather_rows(state, jnp.array([1])), jnp.array([9])
    )
    np.testing.assert_array_equal(untouched, logits)


def test_new_occupant_of_a_slot_starts_clean():
    state = make_state(3, 5, penalties=True, frequency_penalty=1.0)
    state = sampling_state.record_outputs(state, jnp.array([0, 1]), jnp.array([4, 4]))
    rows = make_state(2, 5, temperature=[0.5, 0.7], seed=[[8, 8], [9, 9]])
    state = sampling_state.scatter_rows(
        state, jnp.array([1, 3]), rows
    )  # 3 is out of range: padding
    assert np.asarray(state.output_counts).sum(1).tolist() == [1, 0, 0]
    np.testing.assert_allclose(state.temperature, [0, 0.5, 0])
    assert state.seed[1].tolist() == [8, 8] and state.frequency_penalty.tolist() == [1, 0, 1]


def test_min_tokens_bans_end_ids_until_enough_outputs_exist():
    logits = np.array([[5.0, 4.0, 3.0, 2.0]] * 4, np.float32)
    eos = [[0, 1], [0, -1], [0, 1], [-1, -1]]
    state = make_state(4, 4, eos=eos, min_len=[13, 13, 13, 13])  # 10 prompt tokens, min_tokens=3
    assert run(logits, state, [12, 12, 13, 12]).tokens.tolist() == [2, 1, 0, 0]
    assert run(logits, replace(state, temperature=jnp.ones(4)), [10, 10, 10, 10]).tokens[0] in (
        2,
        3,
    )


def test_logit_bias():
    logits = np.array([[5.0, 4.0, 3.0, 2.0]] * 2, np.float32)
    state = make_state(
        2, 4, bias=([[3, -1, 0], [-1, -1, -1]], [[3.5, 9.0, -2.0], [9.0, 9.0, 9.0]]), num_logprobs=0
    )
    result = run(logits, state, max_logprobs=0)
    assert result.tokens.tolist() == [3, 0]
    reference = logits[0] - np.log(
        np.exp(logits[0]).sum()
    )  # of the raw distribution, before the bias
    np.testing.assert_allclose(result.logprobs, [reference[3], reference[0]], rtol=1e-6)
    assert result.ranks.tolist() == [4, 1] and result.top_ids.shape == (2, 0)


def test_logprobs_ranks_and_top_are_those_of_the_raw_distribution():
    rng, rows, vocab = np.random.default_rng(5), 6, 500
    logits = np.round(rng.normal(size=(rows, vocab)) * 2, 1).astype(np.float32)
    wanted = np.array([-1, 0, 1, 3, 5, 5])
    result = run(
        logits,
        make_state(rows, vocab, temperature=0.7, top_k=50, num_logprobs=wanted),
        max_logprobs=5,
    )
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    for row in range(rows):
        order, token = np.argsort(-logits[row], kind="stable"), result.tokens[row]
        if wanted[row] < 0:
            assert np.isnan(result.logprobs[row]) and result.ranks[row] == 0
        else:
            np.testing.assert_allclose(result.logprobs[row], exact[row, token], rtol=1e-5)
            assert order[result.ranks[row] - 1] == token
        n = max(wanted[row], 0)
        assert result.top_ids[row].tolist() == order[:n].tolist() + [-1] * (5 - n)
        np.testing.assert_allclose(result.top_logprobs[row, :n], exact[row, order[:n]], rtol=1e-5)
        assert np.isnan(result.top_logprobs[row, n:]).all()


def test_prompt_logprobs():
    logits = np.random.default_rng(2).normal(size=(4, 33)).astype(np.float32)
    values, ranks, ids, top = prompt_logprobs(jnp.asarray(logits), jnp.array([0, 5, 32, 7]), 3)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1)
    for row, target in enumerate((0, 5, 32, 7)):
        np.testing.assert_allclose(values[row], exact[row, target], rtol=1e-5)
        assert order[row, ranks[row] - 1] == target
        np.testing.assert_array_equal(ids[row], order[row, :3])
        np.testing.assert_allclose(top[row], exact[row, order[row, :3]], rtol=1e-5)
    assert prompt_logprobs(jnp.asarray(logits), jnp.zeros(4, jnp.int32), 0)[2].shape == (4, 0)


def test_integer_helpers_are_exact():
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(0, 2**32, 500, dtype=np.uint64) for _ in range(3))
    a[:2], b[:2], c[:2] = 2**32 - 1, 2**32 - 1, [2**32 - 1, 0]
    as32 = [jnp.asarray(x.astype(np.uint32)) for x in (a, b, c)]
    np.testing.assert_array_equal(
        random_draw._multiply_high(*as32[:2]),
        [int(x) * int(y) >> 32 for x, y in zip(a, b, strict=True)],
    )
    expected = [
        (int(h) * 2**32 + int(low)) * int(t) >> 64 for h, low, t in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(random_draw._scale_down(*as32), expected)
    share = rng.random(500).astype(np.float32)
    expected = [
        -(-int(np.float64(s) * 2**32) * int(t) // 2**32) for s, t in zip(share, c, strict=True)
    ]
    np.testing.assert_array_equal(random_draw._fraction(jnp.asarray(share), as32[2]), expected)
