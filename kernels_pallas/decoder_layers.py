"""The layers of a dense decoder for one decode step: one call where a backend can, layer by layer
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from .dispatch import dispatch

Weights = tuple[jax.Array, ...]
"""A kernel and, quantised, its companions, as `cpu_matmul.matmul_nt` describes them (int4: kernel,
group, scale)."""


class LayerWeights(NamedTuple):
    """One pre-norm layer: grouped-query attention and SwiGLU, no biases but q, k and v's."""

    attn_norm: jax.Array  # [hidden]
    qkv: Weights  # [(H + 2 KH) D, hidden]
    qkv_bias: jax.Array | None
    q_norm: jax.Array | None  # [D]
    k_norm: jax.Array | None
    out: Weights  # [hidden, H D]
    mlp_norm: jax.Array
    gate_up: Weights  # [2 I, hidden]: gate first
    down: Weights  # [hidden, I]
    window: int | None


class Rows(NamedTuple):
    """One row per sequence. cos, sin: f32 [M, rotated / 2] (channel i pairs with i + rotated / 2);
    the rest i32, as in StepBatch."""

    cos: jax.Array
    sin: jax.Array
    block_tables: jax.Array  # [M, P]
    kv_lens: jax.Array  # [M]
    write_slots: jax.Array  # [M]


class Result(NamedTuple):
    hidden: jax.Array  # [M, hidden] after the last norm, in x's dtype
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def decoder_layers(
    x: jax.Array,
    rows: Rows,
    layers: Sequence[LayerWeights],
    last_norm: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    *,
    eps: float,
    scale: float,
    unfused: Callable[[], Result],
    implementation: str | None = None,
) -> Result:
    """x [M, hidden] through all layers and the last norm; keys, values: each layer's pools [N, bs,
    KH, D], this step's rows written.

    eps: of all norms; scale: of the scores. unfused: computes the same by ops of their own; it
    runs where nothing else can.
    """
    return dispatch(
        "decoder_layers",
        x,
        rows,
        tuple(layers),
        last_norm,
        tuple(keys),
        tuple(values),
        eps=eps,
        scale=scale,
        unfused=unfused,
        implementation=implementation,
    )


def unfused_layers(*_, unfused: Callable[[], Result], **__) -> Result:
    return unfused()
