"""Matrix products of rows sorted by group with one weight matrix per group (MoE experts)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from .dispatch import dispatch

SCALE_BLOCK = 128
_ROW_TILE_RANGE = (8, 64)


Stack = Shaped[Array, "E N K"]
"""One weight matrix per group: floats, or int8 or e4m3 with scales."""

Scales = Float[Array, "E blocks_N blocks_K"] | Float[Array, "E N"]
Sizes = Int32[Array, " E"]


def _check(
    op: str, x: Float[Array, "M K"], w: Stack, group_sizes: Sizes, w_scale: Scales | None
) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] or group_sizes.shape != w.shape[:1]:
        raise ValueError(
            f"{op}: x [M, K], w [E, N, K], group_sizes [E] expected, got {x.shape}, {w.shape},"
            f" {group_sizes.shape}"
        )
    if w_scale is not None:
        e, n, k = w.shape
        blocks = (e, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
        if w_scale.shape not in (blocks, (e, n)):
            raise ValueError(
                f"{op}: w_scale must be {blocks} (128 x 128 blocks) or {(e, n)} (output channels),"
                f" got {w_scale.shape}"
            )


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Stack,
    group_sizes: Sizes,
    *,
    w_scale: Scales | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """`x[M, K]` rows sorted by group times `w[E, N, K]` of their group -> `[M, N]` in x's dtype,
    summed in float32.

    group_sizes: i32 `[E]`, rows per group, zeros allowed; rows past their sum give zeros and are
    never read into a result. w_scale: f32 `[E, ceil(N/128), ceil(K/128)]` (block-scaled e4m3
    weights) or `[E, N]` (one per output channel; int8, fp8).
    """
    _check("grouped_matmul", x, w, group_sizes, w_scale)
    return dispatch(
        "grouped_matmul", x, w, group_sizes, w_scale=w_scale, implementation=implementation
    )


def moe_experts(
    x: Float[Array, "M K"],
    gate_up: Shaped[Array, "E two_I K"],
    down: Shaped[Array, "E K I"],
    group_sizes: Sizes,
    *,
    scales: tuple[Scales, Scales] | None = None,
    row_weights: Float[Array, " M"] | None = None,
    swiglu_limit: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "M K"]:
    """SwiGLU experts: `down[e] @ (silu(gate) * up)` with `gate, up = split(gate_up[e] @ x)`, rows
    sorted by expert -> `[M, K]`.

    x: `[M, K]`; gate_up: `[E, 2I, K]` (gate rows first); down: `[E, K, I]`; group_sizes: i32 `[E]`.
    scales: (gate_up, down) as `w_scale` of `grouped_matmul`. row_weights: f32 `[M]`, combine
    weights multiplied into the result. swiglu_limit: see `gated`. Rows past sum(group_sizes) give
    zeros.
    """
    gate_up_scale, down_scale = scales or (None, None)
    _check("moe_experts", x, gate_up, group_sizes, gate_up_scale)
    e, n, k = gate_up.shape
    if n % 2 or down.shape != (e, k, n // 2):
        raise ValueError(
            f"moe_experts: gate_up [E, 2I, K] and down [E, K, I] expected, got {gate_up.shape} and"
            f" {down.shape}"
        )
    _check("moe_experts", jax.ShapeDtypeStruct((0, n // 2), x.dtype), down, group_sizes, down_scale)
    return dispatch(
        "moe_experts",
        x,
        gate_up,
        down,
        group_sizes,
        scales=scales,
        row_weights=row_weights,
        swiglu_limit=swiglu_limit,
        implementation=implementation,
    )


def gated(gate: jax.Array, up: jax.Array, limit: float | None = None) -> jax.Array:
    """silu(gate) * up. limit: gate is clamped to at most this, up to at most this either way
    (DeepSeek-V4)."""
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def dequantize(w: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """`w[N, K]` times its block `[N/128, K/128]` or output-channel `[N]` scales, in `dtype`."""
    if scale is None:
        return w.astype(dtype)
    n, k = w.shape
    if scale.ndim == 2:
        scale = jnp.repeat(jnp.repeat(scale, SCALE_BLOCK, axis=0)[:n], SCALE_BLOCK, axis=1)[:, :k]
    return (w.astype(jnp.float32) * scale.reshape(n, -1)).astype(dtype)


def _row_tile(rows: int, groups: int) -> int:
    """Rows per tile: about twice a group's mean share; single rows when most groups are empty or
    tiny (docs/decisions/003)."""
    if rows <= groups:
        return 1
    low, high = _ROW_TILE_RANGE
    return min(max(low, 1 << (2 * rows // groups - 1).bit_length()), high)


def _for_row_tiles(
    x: Float[Array, "M K"],
    group_sizes: Sizes,
    width: int,
    apply: Callable[[Int32[Array, ""], Float[Array, "B K"]], Float[Array, "B width"]],
) -> Float[Array, "M width"]:
    """Loop over live (group, row tile) pairs in row order.

    Whole tiles are stored: rows past a group's end are overwritten by the next group's first tile.
    """
    m = x.shape[0]
    tile = _row_tile(m, group_sizes.size)
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    tile_ends = jnp.cumsum((group_sizes + tile - 1) // tile)
    item_group = jnp.searchsorted(
        tile_ends, jnp.arange(m // tile + group_sizes.size), side="right", method="compare_all"
    )
    row_ends = jnp.cumsum(group_sizes)

    def step(item, out):
        group = item_group[item]
        first_item = jnp.where(group > 0, tile_ends[group - 1], 0)
        start = row_ends[group] - group_sizes[group] + (item - first_item) * tile
        rows = lax.dynamic_slice_in_dim(padded, start, tile)
        return lax.dynamic_update_slice_in_dim(out, apply(group, rows).astype(x.dtype), start, 0)

    out = lax.fori_loop(0, tile_ends[-1], step, jnp.zeros((m + tile, width), x.dtype))
    return jnp.where((jnp.arange(m) < row_ends[-1])[:, None], out[:m], 0)


def _pick(stack: jax.Array | None, group: jax.Array) -> jax.Array | None:
    return None if stack is None else lax.dynamic_index_in_dim(stack, group, 0, keepdims=False)


def _product(rows: jax.Array, w: jax.Array, scale: jax.Array | None, group: jax.Array) -> jax.Array:
    """rows[B, K] @ w[group].T -> f32 [B, N]."""
    dtype = rows.dtype if w.dtype.itemsize <= rows.dtype.itemsize else w.dtype
    weight = dequantize(_pick(w, group), _pick(scale, group), dtype)
    return lax.dot_general(
        rows.astype(dtype), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def grouped_matmul_xla(
    x: Float[Array, "M K"], w: Stack, group_sizes: Sizes, *, w_scale: Scales | None = None
) -> Float[Array, "M N"]:
    """See `grouped_matmul`."""
    return _for_row_tiles(
        x, group_sizes, w.shape[1], lambda group, rows: _product(rows, w, w_scale, group)
    )


def moe_experts_xla(
    x: Float[Array, "M K"],
    gate_up: Shaped[Array, "E two_I K"],
    down: Shaped[Array, "E K I"],
    group_sizes: Sizes,
    *,
    scales: tuple[Scales, Scales] | None = None,
    row_weights: Float[Array, " M"] | None = None,
    swiglu_limit: float | None = None,
) -> Float[Array, "M K"]:
    """See `moe_experts`."""
    gate_up_scale, down_scale = scales or (None, None)

    def expert(group, rows):
        gate, up = jnp.split(_product(rows, gate_up, gate_up_scale, group), 2, axis=-1)
        hidden = gated(gate, up, swiglu_limit).astype(x.dtype)
        return _product(hidden, down, down_scale, group)

    out = _for_row_tiles(x, group_sizes, x.shape[1], expert)
    return out if row_weights is None else (out * row_weights[:, None]).astype(x.dtype)
