"""Gated feed-forward layer (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.kernels_pallas.grouped_matmul import gated
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.linear import WHOLE, Linear


def swiglu(gate_up: jax.Array, limit: float | None = None) -> jax.Array:
    """[..., 2 I] (gate first, then up) -> silu(gate) * up [..., I].

    limit: see `gated`.
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return gated(gate, up, limit)


class SwiGLU(nnx.Module):
    """x [..., hidden] -> [..., hidden]; gate and up are one kernel, laid out per tp rank as (gate
    rows, up rows)."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        dtype: jnp.dtype,
        quant: str | None = None,
        axes: ParallelAxes = WHOLE,
    ) -> None:
        if intermediate % axes.tp:
            raise ValueError(f"intermediate size {intermediate} is not divisible by tp={axes.tp}")
        self.gate_up = Linear(
            hidden, 2 * intermediate, bias=bias, dtype=dtype, quant=quant, tp="column", axes=axes
        )
        self.down = Linear(
            intermediate, hidden, bias=bias, dtype=dtype, quant=quant, tp="row", axes=axes
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(swiglu(self.gate_up(x)))
