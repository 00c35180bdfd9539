"""Weight storage formats of linear layers: what is stored, and how it is made at load.

The formats themselves are those of the `matmul` op (kernels_pallas/matmul.py has the table), which
also computes with them. Here: `storage` (shapes), `quantize` (NumPy, at load, row by row so that
rows of several tensors can be fused) and `dequantize`.
Measured: docs/decisions/010-quantised-linears-on-cpu.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from deepinfer_jax.kernels_pallas.matmul import INT4_GROUP, int4_halves

INT4_MAX_GROUP_FACTOR = 18  # 7 * 18 = 126 fits int8
FP8_BLOCK = 128
FP8_MAX = 448.0


# --- int8 -----------------------------------------------------------------------------------------


def _int8_storage(n: int, k: int) -> tuple:
    return ((n, k), jnp.int8), ((n,), jnp.float32)


def _int8_quantize(w: np.ndarray) -> tuple[np.ndarray, ...]:
    scale = np.abs(w).max(axis=-1) / 127.0
    q = np.rint(w / np.where(scale == 0, 1.0, scale)[..., None])
    return q.astype(np.int8), scale.astype(np.float32)


def _int8_dequantize(dtype: jnp.dtype, q: jax.Array, scale: jax.Array) -> jax.Array:
    return (q.astype(jnp.float32) * scale[..., None]).astype(dtype)


# --- int4 -----------------------------------------------------------------------------------------


def _int4_storage(n: int, k: int) -> tuple:
    if k % (2 * INT4_GROUP):
        raise ValueError(
            f"int4 needs an input dimension that is a multiple of {2 * INT4_GROUP}, got {k}"
        )
    return ((n, k // 2), jnp.uint8), ((n, k // INT4_GROUP), jnp.int8), ((n,), jnp.float32)


def _int4_quantize(w: np.ndarray) -> tuple[np.ndarray, ...]:
    """Group steps are rounded up to multiples of the row's smallest one, so that no weight is
    clipped."""
    groups = w.reshape(*w.shape[:-1], -1, INT4_GROUP)
    step = np.abs(groups).max(axis=-1) / 7.0
    scale = step.max(axis=-1) / INT4_MAX_GROUP_FACTOR
    safe = np.where(scale == 0, 1.0, scale)[..., None]
    factor = np.clip(np.ceil(step / safe - 1e-5), 1, INT4_MAX_GROUP_FACTOR)
    q = np.clip(np.rint(groups / (factor * safe)[..., None]), -7, 7).astype(np.int8) + 8
    halves = q.reshape(*w.shape[:-1], -1, 2, INT4_GROUP)
    packed = (halves[..., 0, :] | (halves[..., 1, :] << 4)).astype(np.uint8)
    return packed.reshape(*w.shape[:-1], -1), factor.astype(np.int8), scale.astype(np.float32)


def _int4_dequantize(
    dtype: jnp.dtype, q: jax.Array, group: jax.Array, scale: jax.Array
) -> jax.Array:
    values = jnp.stack(int4_halves(q, group), axis=-2)
    return _int8_dequantize(dtype, values.reshape(*q.shape[:-1], -1), scale)


# --- fp8 ------------------------------------------------------------------------------------------


def _blocks(n: int) -> int:
    return -(-n // FP8_BLOCK)


def _fp8_storage(n: int, k: int) -> tuple:
    return ((n, k), jnp.float8_e4m3fn), ((_blocks(n), _blocks(k)), jnp.float32)


def _fp8_quantize(w: np.ndarray) -> tuple[np.ndarray, ...]:
    n, k = w.shape[-2:]
    scale = np.ones((*w.shape[:-2], _blocks(n), _blocks(k)), np.float32)
    for i in range(_blocks(n)):
        for j in range(_blocks(k)):
            block = w[..., i * FP8_BLOCK : (i + 1) * FP8_BLOCK, j * FP8_BLOCK : (j + 1) * FP8_BLOCK]
            scale[..., i, j] = np.abs(block).max(axis=(-2, -1)) / FP8_MAX
    scale[scale == 0] = 1.0
    return (w / expand_blocks(scale, n, k)).astype(ml_dtypes.float8_e4m3fn), scale


def expand_blocks(scale: np.ndarray | jax.Array, n: int, k: int) -> np.ndarray | jax.Array:
    """scale [..., ceil(n/128), ceil(k/128)] -> [..., n, k]: each block's factor repeated over its
    elements."""
    xp = jnp if isinstance(scale, jax.Array) else np
    return xp.repeat(xp.repeat(scale, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)[..., :n, :k]


def _fp8_dequantize(dtype: jnp.dtype, q: jax.Array, scale: jax.Array) -> jax.Array:
    return (q.astype(jnp.float32) * expand_blocks(scale, *q.shape[-2:])).astype(dtype)


# --- table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantFormat:
    """One storage format; "parts" are the kernel and then the companions, named `<kernel><suffix>`,
    in this order everywhere.

    storage(n, k) -> (shape, dtype) of each part; quantize(w float32 [..., n, k]) -> parts;
    dequantize(dtype, *parts) -> [..., n, k] (leading dimensions allowed, as for stacked experts).
    row_block, col_block: rows and inputs that a tp split must keep together (col_block 1: any).
    packing: inputs per stored kernel element. random_std: standard deviation of a kernel of random
    bytes, in units of the scale.
    """

    name: str
    suffixes: tuple[str, ...]
    storage: Callable
    quantize: Callable
    dequantize: Callable
    row_block: int = 1
    col_block: int = 1
    packing: int = 1
    random_std: float | None = None


QUANT_FORMATS: dict[str, QuantFormat] = {
    f.name: f
    for f in (
        QuantFormat(
            "int8",
            ("_scale",),
            _int8_storage,
            _int8_quantize,
            _int8_dequantize,
            random_std=73.9,
        ),
        QuantFormat(
            "int4",
            ("_group", "_scale"),
            _int4_storage,
            _int4_quantize,
            _int4_dequantize,
            col_block=2 * INT4_GROUP,
            packing=2,
            random_std=4.6,
        ),
        QuantFormat(
            "fp8",
            ("_scale",),
            _fp8_storage,
            _fp8_quantize,
            _fp8_dequantize,
            FP8_BLOCK,
            FP8_BLOCK,
        ),
    )
}


def quant_format(name: str) -> QuantFormat:
    """The format called `name`; ValueError naming the known ones otherwise."""
    if name not in QUANT_FORMATS:
        raise ValueError(f"unknown weight format {name!r}; known: {sorted(QUANT_FORMATS)}")
    return QUANT_FORMATS[name]
