"""Verification: which drafts are the tokens that decoding one by one would have chosen.

A token is a function of (logits, parameters, seed, position) alone (see `sampler`). So the rows of
a step are sampled in order with the random number of their own position: the first row's token is
what plain decoding gives; if it equals the first draft, the second row's logits are those of plain
decoding too, and so on until a draft differs. The output is the very sequence of plain decoding, at
any temperature and with every sampling parameter, because nothing is accepted that was not drawn.

For one draft d the chance of acceptance is p(d), the target's probability of it: with
deterministic drafts that is also what rejection sampling reaches (Leviathan et al.,
arXiv:2211.17192, section 2.3: the sum over x of min(p(x), q(x)) with q a point mass).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepinfer_jax.runner.decode_state import DecodeState

NOT_REACHED = -2
"""The token of a result row behind the first draft that was not accepted."""

SampleRows = Callable[
    [Float[Array, "R V"], DecodeState, Int[Array, " R"], Int[Array, " R"]], Int[Array, "R W"]
]
"""(logits, state, slots, positions) -> packed results, one token per row."""


def verify(
    logits: Float[Array, "R Q V"],
    state: DecodeState,
    slots: Int[Array, " R"],
    drafts: Int[Array, "R K"],
    num_drafts: Int[Array, " R"],
    sample: SampleRows,
) -> tuple[DecodeState, Int[Array, "R Q W"]]:
    """Samples up to Q = 1 + K tokens per slot and appends them to the state.

    Row q of a slot holds the logits after its tokens and its first q drafts; num_drafts [R] of the
    drafts count. Slots out of range are padding. Result rows behind the first token that is not the
    draft are NOT_REACHED; ERROR_TOKEN ends a slot's rows as well.
    """
    nowhere = state.num_slots
    drafts = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NOT_REACHED)

    def one_row(
        carry: tuple[DecodeState, Array], row: tuple[Array, Array, Array]
    ) -> tuple[tuple[DecodeState, Array], Array]:
        (state, alive), (q, row_logits, draft) = carry, row
        mine = jnp.where(alive, slots, nowhere)
        positions = state.num_tokens[jnp.minimum(slots, nowhere - 1)]
        results = sample(row_logits, state, mine, positions)
        tokens = results[:, 0]
        state = state.append(mine, tokens, positions + 1)
        results = results.at[:, 0].set(jnp.where(alive, tokens, NOT_REACHED))
        return (state, alive & (q < num_drafts) & (tokens == draft)), results

    count = logits.shape[1]
    rows = (jnp.arange(count), logits.swapaxes(0, 1), drafts[:, :count].T)
    (state, _), results = jax.lax.scan(one_row, (state, slots < nowhere), rows)
    return state, results.swapaxes(0, 1)
