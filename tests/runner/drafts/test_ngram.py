"""Prompt lookup on the device against a loop over the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runner.drafts.ngram import propose


def looked_up(tokens: list[int], count: int, min_match: int, window: int) -> list[int]:
    best, end = 0, None
    for place in range(len(tokens) - 1):
        run = 0
        while run < min(window, place + 1) and tokens[place - run] == tokens[-1 - run]:
            run += 1
        if run >= max(min_match, best):
            best, end = run, place
    if end is None:
        return []
    period = tokens[end + 1 :]
    return [period[i % len(period)] for i in range(count)]


@pytest.mark.parametrize(("min_match", "window"), [(1, 1), (1, 4), (2, 3), (3, 3)])
@pytest.mark.parametrize("vocab", [2, 5])
def test_equals_the_loop(min_match, window, vocab):
    rng = np.random.default_rng(7 * vocab + window)
    lengths = rng.integers(1, 40, 64)
    history = rng.integers(0, vocab, (64, 40)).astype(np.int32)
    f = jax.jit(propose, static_argnums=2, static_argnames=("min_match", "window"))
    drafts, counts = f(
        jnp.asarray(history), jnp.asarray(lengths, jnp.int32), 6, min_match=min_match, window=window
    )
    for row, length in enumerate(lengths):
        want = looked_up(history[row, :length].tolist(), 6, min_match, window)
        assert np.asarray(drafts)[row, : counts[row]].tolist() == want


def test_what_lies_behind_the_tokens_is_not_read():
    history = jnp.asarray([[1, 2, 3, 1, 2, 9, 9, 9], [4, 5, 6, 7, 9, 4, 5, 9]], jnp.int32)
    drafts, counts = propose(history, jnp.asarray([5, 4]), 4, min_match=2, window=3)
    assert np.asarray(drafts)[0].tolist() == [3, 1, 2, 3] and np.asarray(counts).tolist() == [4, 0]
