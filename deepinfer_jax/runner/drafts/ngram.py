"""Prompt lookup: what followed the last tokens when they occurred before is the draft.

The method is that of prompt-lookup decoding (Saxena 2023; "LLMA", arXiv:2304.04487): no model, only
the sequence's own tokens. Everything runs on the device, so a step needs nothing from the host.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def propose(
    history: Int[Array, "R L"],
    num_tokens: Int[Array, " R"],
    count: int,
    *,
    min_match: int,
    window: int,
) -> tuple[Int[Array, "R K"], Int[Array, " R"]]:
    """Drafts for the `count` positions after each row's tokens, and how many of them count.

    history holds a row's tokens at 0 .. num_tokens - 1; what lies behind them is not read. The
    place whose last tokens agree longest with the row's own end (`window` tokens at most,
    `min_match` at least) wins, the latest among equals. Its continuation is copied, over and over
    where it reaches the row's end: (a b c a b) with four drafts gives (c a b c). Rows without such
    a place have 0 drafts. Costs O(R * L * window) integer comparisons.
    """
    rows, length = history.shape
    place = jnp.arange(length, dtype=jnp.int32)
    last = num_tokens[:, None] - 1
    agree = jnp.ones((rows, length), bool)
    run = jnp.zeros((rows, length), jnp.int32)
    for back in range(window):
        own = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
        there = jnp.pad(history, ((0, 0), (back, 0)))[:, :length]
        agree &= (there == own) & (place >= back) & (last >= back)
        run += agree
    # `place` is where the earlier occurrence ends: before the row's own last token
    usable = (place < last) & (run >= min_match)
    score = jnp.where(usable, run * length + place, -1)
    best = jnp.max(score, axis=1)
    end = jnp.where(best >= 0, best % length, 0)
    period = jnp.maximum(num_tokens - 1 - end, 1)
    offsets = jnp.arange(count, dtype=jnp.int32) % period[:, None]
    drafts = jnp.take_along_axis(history, end[:, None] + 1 + offsets, axis=1)
    return drafts, jnp.where(best >= 0, count, 0).astype(jnp.int32)
