"""Weight storage formats of linear layers: what is stored, how it is made at load, and the matmul that reads it.

A format stores `kernel` [N, K] and, unless it is plain float, `kernel_scale`. Each has three functions: `storage` (shapes),
`quantize` (NumPy, at load, row by row so that rows of several tensors can be fused) and `matmul`.

int8   int8 [N, K],          scale float32 [N]                   w = q * scale                 symmetric, -127..127
int4   uint8 [N, K / 2],     scale float32 [N, K / GROUP]        w = (q - 8) * scale           symmetric, 1..15
fp8    float8_e4m3fn [N, K], scale float32 [N/128, K/128] (ceil) w = q * scale                 blocks as in DeepSeek-V3
int4 packs element k of each group's first half in the low nibble and element k + GROUP/2 in the high one, so that
unpacking is two shifts and no interleave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

INT4_GROUP = 32
FP8_BLOCK = 128
FP8_MAX = 448.0


def dot_last(x: jax.Array, w: jax.Array, preferred: jnp.dtype | None = None) -> jax.Array:
    """x [..., K] . w [N, K] -> [..., N]: contracts the last dimension of both, so weights keep their checkpoint layout."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=preferred)


# --- int8 ---------------------------------------------------------------------------------------------------------


def _int8_storage(n: int, k: int) -> tuple[tuple[int, ...], jnp.dtype, tuple[int, ...]]:
    return (n, k), jnp.dtype(jnp.int8), (n,)


def _int8_quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(w).max(axis=-1) / 127.0
    q = np.rint(w / np.where(scale == 0, 1.0, scale)[..., None])
    return q.astype(np.int8), scale.astype(np.float32)


def _int8_dequantize(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return q.astype(dtype) * scale[..., None].astype(dtype)


def int8_matmul(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., K], q int8 [N, K], scale [N] -> [..., N]; the scale is per output, so it multiplies the result."""
    return dot_last(x, q.astype(x.dtype)) * scale.astype(x.dtype)


# --- int4 ---------------------------------------------------------------------------------------------------------


def _int4_storage(n: int, k: int) -> tuple[tuple[int, ...], jnp.dtype, tuple[int, ...]]:
    if k % INT4_GROUP:
        raise ValueError(f"int4 needs an input dimension that is a multiple of {INT4_GROUP}, got {k}")
    return (n, k // 2), jnp.dtype(jnp.uint8), (n, k // INT4_GROUP)


def _int4_quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = w.reshape(*w.shape[:-1], -1, INT4_GROUP)
    scale = np.abs(groups).max(axis=-1) / 7.0
    q = np.clip(np.rint(groups / np.where(scale == 0, 1.0, scale)[..., None]), -7, 7).astype(np.int8) + 8
    low, high = q[..., : INT4_GROUP // 2], q[..., INT4_GROUP // 2 :]
    packed = (low | (high << 4)).astype(np.uint8)
    return packed.reshape(*w.shape[:-1], -1), scale.astype(np.float32)


def _int4_dequantize(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    packed = q.reshape(*scale.shape, INT4_GROUP // 2)
    halves = jnp.concatenate([packed & 15, packed >> 4], axis=-1)
    values = (halves.astype(jnp.int8) - 8).astype(dtype) * scale[..., None].astype(dtype)
    return values.reshape(*scale.shape[:-1], -1)


def int4_matmul(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., K], q uint8 [N, K/2], scale [N, K/GROUP] -> [..., N]."""
    return dot_last(x, _int4_dequantize(q, scale, x.dtype))


# --- fp8 ----------------------------------------------------------------------------------------------------------


def _blocks(n: int) -> int:
    return -(-n // FP8_BLOCK)


def _fp8_storage(n: int, k: int) -> tuple[tuple[int, ...], jnp.dtype, tuple[int, ...]]:
    return (n, k), jnp.dtype(jnp.float8_e4m3fn), (_blocks(n), _blocks(k))


def _fp8_quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n, k = w.shape[-2:]
    scale = np.ones((*w.shape[:-2], _blocks(n), _blocks(k)), np.float32)
    for i in range(_blocks(n)):
        for j in range(_blocks(k)):
            block = w[..., i * FP8_BLOCK : (i + 1) * FP8_BLOCK, j * FP8_BLOCK : (j + 1) * FP8_BLOCK]
            scale[..., i, j] = np.abs(block).max(axis=(-2, -1)) / FP8_MAX
    scale[scale == 0] = 1.0
    return (w / expand_blocks(scale, n, k)).astype(ml_dtypes.float8_e4m3fn), scale


def expand_blocks(scale: np.ndarray | jax.Array, n: int, k: int) -> np.ndarray | jax.Array:
    """scale [..., ceil(n/128), ceil(k/128)] -> [..., n, k]: each block's factor repeated over its elements."""
    xp = jnp if isinstance(scale, jax.Array) else np
    return xp.repeat(xp.repeat(scale, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)[..., :n, :k]


def _fp8_dequantize(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (q.astype(jnp.float32) * expand_blocks(scale, *q.shape[-2:])).astype(dtype)


def fp8_matmul(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., K], q float8_e4m3fn [N, K], scale [ceil(N/128), ceil(K/128)] -> [..., N]."""
    return dot_last(x, _fp8_dequantize(q, scale, x.dtype))


# --- table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantFormat:
    """storage(n, k) -> (kernel shape, kernel dtype, scale shape); quantize(w float32 [..., n, k]) -> (kernel, scale);
    dequantize(kernel, scale, dtype) -> [..., n, k] (leading dimensions allowed, as for stacked experts);
    matmul(x, kernel, scale) -> [..., n].
    row_block, col_block: how many rows / inputs share a scale row / column (0: all inputs share it, the scale is one-dimensional).
    packing: inputs per stored element.
    """

    name: str
    storage: Callable
    quantize: Callable
    dequantize: Callable
    matmul: Callable
    row_block: int
    col_block: int
    packing: int = 1


QUANT_FORMATS: dict[str, QuantFormat] = {
    f.name: f
    for f in (
        QuantFormat("int8", _int8_storage, _int8_quantize, _int8_dequantize, int8_matmul, 1, 0),
        QuantFormat("int4", _int4_storage, _int4_quantize, _int4_dequantize, int4_matmul, 1, INT4_GROUP, packing=2),
        QuantFormat("fp8", _fp8_storage, _fp8_quantize, _fp8_dequantize, fp8_matmul, FP8_BLOCK, FP8_BLOCK),
    )
}


def quant_format(name: str) -> QuantFormat:
    """The format called `name`; ValueError naming the known ones otherwise."""
    if name not in QUANT_FORMATS:
        raise ValueError(f"unknown weight format {name!r}; known: {sorted(QUANT_FORMATS)}")
    return QUANT_FORMATS[name]
