"""Products with float32, bfloat16, int8 and 4-bit weights on a CPU, at the speed of its memory.

Decode reads every weight once for a few rows. XLA's CPU dots reach the memory's speed for none of
these formats (docs/decisions/011-cpu-matmul.md), so `matmul.cc` is compiled on first use
(native.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas.cpu import native
from deepinfer_jax.kernels_pallas.matmul import Weights

FORMATS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8, "int4": jnp.uint8}
"""Formats of the C++ side and the dtype of their kernels."""

MAX_ROWS = {"f32": 64, "bf16": 8, "int8": 1 << 30, "int4": 1 << 30}
"""From more rows on XLA's float products, which pack the weights first, are faster
(docs/decisions/011-cpu-matmul.md)."""


def native_format(weights: Weights) -> str | None:
    """The key in FORMATS of these weights; None where the C++ side has no product for them."""
    names = {jnp.dtype(dtype): name for name, dtype in FORMATS.items()}
    return names.get(jnp.dtype(weights[0].dtype))


def unsupported_reason(x: jax.Array, weights: Weights, *, out_dtype: jnp.dtype) -> str | None:
    """Why the custom call cannot take these operands, or should not; None if it can."""
    del out_dtype
    format = native_format(weights)
    if format is None:
        return f"no products with weights of {weights[0].dtype}"
    if x.shape[0] > MAX_ROWS[format]:
        return f"XLA is faster for more than {MAX_ROWS[format]} rows of {format}"
    return native.unsupported_reason("matmul")


def matmul_native(
    x: Float[Array, "M K"], weights: Weights, *, out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """See `matmul`; activations and sums in float32."""
    out = jax.ShapeDtypeStruct((x.shape[0], weights[0].shape[0]), jnp.float32)
    call = jax.ffi.ffi_call(native.custom_call("matmul"), out, vmap_method="sequential")
    return call(x.astype(jnp.float32), *weights).astype(out_dtype)
