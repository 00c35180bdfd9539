"""The layers of a dense decoder for one step: one call where a backend can, layer by layer
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from .dispatch import dispatch
from .matmul import Weights


class LinearWeights(NamedTuple):
    """One linear layer: `parts` as the `matmul` op takes them."""

    parts: Weights
    bias: Float[Array, " N"] | None = None


class LayerWeights(NamedTuple):
    """One pre-norm layer: grouped-query attention and SwiGLU."""

    attn_norm: Float[Array, " hidden"]
    qkv: LinearWeights  # [(H + 2 KH) D, hidden]
    q_norm: Float[Array, " D"] | None
    k_norm: Float[Array, " D"] | None
    out: LinearWeights  # [hidden, H D]
    mlp_norm: Float[Array, " hidden"]
    gate_up: LinearWeights  # [2 I, hidden]: gate first
    down: LinearWeights  # [hidden, I]
    window: int | None
    shards: int = 1  # over how many ranks the linear layers are split


class Rows(NamedTuple):
    """The step's T rows of S sequences. cos, sin: channel i pairs with i + rotated / 2; the rest
    as in StepBatch."""

    cos: Float[Array, "T half_rotated"]
    sin: Float[Array, "T half_rotated"]
    block_tables: Int32[Array, "S P"]
    kv_lens: Int32[Array, " S"]
    write_slots: Int32[Array, " T"]


class Result(NamedTuple):
    hidden: Float[Array, "T hidden"]  # after the last norm, in x's dtype
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def decoder_layers(
    x: Float[Array, "T hidden"],
    rows: Rows,
    layers: Sequence[LayerWeights],
    last_norm: Float[Array, " hidden"],
    keys: Sequence[Float[Array, "N bs KH D"]],
    values: Sequence[Float[Array, "N bs KH D"]],
    *,
    row_per_sequence: bool,
    eps: float,
    scale: float,
    unfused: Callable[[], Result],
    implementation: str | None = None,
) -> Result:
    """x through all layers and the last norm; keys, values: each layer's pools, this step's rows
    written.

    row_per_sequence: a decode step, whose row i is the one row of sequence i (T == S). eps: of all
    norms. scale: of the scores. unfused: computes the same by ops of their own; it runs where
    nothing else can.
    """
    return dispatch(
        "decoder_layers",
        x,
        rows,
        tuple(layers),
        last_norm,
        tuple(keys),
        tuple(values),
        row_per_sequence=row_per_sequence,
        eps=eps,
        scale=scale,
        unfused=unfused,
        implementation=implementation,
    )


def unfused_layers(*_: object, unfused: Callable[[], Result], **__: object) -> Result:
    return unfused()
