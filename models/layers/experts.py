"""The experts a rank holds, applied to rows that each name up to k of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from deepinfer_jax.kernels_pallas.grouped_matmul import moe_experts
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.linear import make_kernel

EXPERT_FORMATS = (None, "int8", "fp8")


class Experts(nnx.Module):
    """SwiGLU experts stacked on dimension 0, which is split over ep: `gate_up` [P, 2I, D] (gate
    rows first, per tp rank), `down` [P, D, I].

    P is the number of physical slots. With tp > 1, `__call__` returns this rank's partial sum over
    the intermediate dimension.
    """

    def __init__(
        self,
        num_physical: int,
        hidden: int,
        intermediate: int,
        *,
        dtype: jnp.dtype,
        quant: str | None,
        axes: ParallelAxes,
        rows_per_pass: int = 32768,
        swiglu_limit: float | None = None,
    ) -> None:
        if quant not in EXPERT_FORMATS:
            raise ValueError(f"experts can be stored as {EXPERT_FORMATS}, not {quant!r}")
        if num_physical % axes.ep:
            raise ValueError(f"{num_physical} physical experts do not divide over ep={axes.ep}")
        if intermediate % axes.tp:
            raise ValueError(
                f"moe intermediate size {intermediate} is not divisible by tp={axes.tp}"
            )
        self.quant, self.ep, self.rows_per_pass = quant, axes.ep, rows_per_pass
        self.swiglu_limit = swiglu_limit
        make_kernel(
            self,
            "gate_up",
            (num_physical, 2 * intermediate, hidden),
            ("expert", "tp", None),
            dtype,
            quant,
        )
        make_kernel(
            self, "down", (num_physical, hidden, intermediate), ("expert", None, "tp"), dtype, quant
        )

    def __call__(self, rows: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """rows [R, D], ids i32 [R, k] local slots (-1: none), weights f32 [R, k] -> sum of weight *
        expert(row), f32 [R, D]."""
        scales = (self.gate_up_scale[...], self.down_scale[...]) if self.quant else None
        per_pass = min(self.rows_per_pass, pairs_per_pass(*ids.shape, self.ep))
        return apply_experts(
            rows,
            ids,
            weights,
            self.gate_up[...],
            self.down[...],
            scales,
            per_pass,
            self.swiglu_limit,
        )


def pairs_per_pass(rows: int, k: int, ep: int) -> int:
    """Pairs computed at once: all there are on a single rank; else a quarter more than a rank gets
    of them when routing is even.

    Received rows name experts of all ranks, so of rows * k pairs about one in ep is live: buffers
    for all would be ep times too large.
    """
    return rows * k if ep == 1 else max(256, -(-5 * rows * k // (4 * ep)))


def apply_experts(
    rows: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    per_pass: int = 32768,
    swiglu_limit: float | None = None,
) -> jax.Array:
    """Sorts (row, expert) pairs by expert, runs the grouped matmul on them and adds the results up
    per row. See `Experts.__call__`.

    per_pass: pairs computed at once; when more are live, further passes follow. A row's experts
    must be distinct.
    """
    num_experts, (r, k) = gate_up.shape[0], ids.shape
    key = jnp.where(ids >= 0, ids, num_experts).reshape(-1)
    sizes = jnp.zeros(num_experts, jnp.int32).at[key].add(1, mode="drop")
    pairs = r * min(
        k, num_experts
    )  # as a row's experts are distinct, no more than this many are live
    order = jnp.argsort(key, stable=True)[:pairs].astype(jnp.int32)
    weights = jnp.where(ids >= 0, weights, 0.0)

    def experts(x: jax.Array, counts: jax.Array) -> jax.Array:
        return moe_experts(x, gate_up, down, counts, scales=scales, swiglu_limit=swiglu_limit)

    if pairs <= per_pass:
        return _sum_per_row(experts(rows[order // k], sizes), order, weights)
    return _in_passes(rows, order, sizes, weights, experts, per_pass)


def _sum_per_row(out: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """One gather per choice rather than one of [R, k, D], which would be a buffer k times the size
    of the result."""
    r, k = weights.shape
    place = (
        jnp.zeros(r * k, jnp.int32)
        .at[order]
        .set(jnp.arange(len(order), dtype=jnp.int32))
        .reshape(r, k)
    )
    return sum(out[place[:, j]].astype(jnp.float32) * weights[:, j, None] for j in range(k))


def _in_passes(
    rows: Float[Array, "R D"],
    order: Int32[Array, " Rk"],
    sizes: Int32[Array, " E"],
    weights: Float[Array, "R k"],
    experts: Callable[[jax.Array, jax.Array], jax.Array],
    per_pass: int,
) -> Float[Array, "R D"]:
    """As many passes of `per_pass` sorted pairs as there are live pairs: memory is bounded, work
    follows the load."""
    (r, k), ends = weights.shape, jnp.cumsum(sizes)
    padded, slot = jnp.pad(order, (0, per_pass)), jnp.arange(per_pass, dtype=jnp.int32)

    def one(i, total):
        low = i * per_pass
        pair = jax.lax.dynamic_slice_in_dim(padded, low, per_pass)
        live = jnp.clip(ends, low, low + per_pass) - jnp.clip(ends - sizes, low, low + per_pass)
        out = experts(rows[pair // k], live).astype(jnp.float32) * weights.reshape(-1)[pair, None]
        # a row occurs once per choice: no two updates meet, so the sum's order is fixed on every
        # backend
        for j in range(k):
            mine = (pair % k == j) & (low + slot < ends[-1])
            total = total.at[jnp.where(mine, pair // k, r + slot)].add(
                out, mode="drop", unique_indices=True
            )
        return total

    return jax.lax.fori_loop(0, -(-ends[-1] // per_pass), one, jnp.zeros(rows.shape, jnp.float32))
