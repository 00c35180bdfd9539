"""Products of activations with stored weights: one op for every storage format of a linear layer.

Weights are a tuple of arrays, told apart by the dtype of the first one, the kernel:

    format   kernel                     companions
    float    float32, bfloat16, ...     none
             [N, K]
    int8     int8 [N, K]                scale f32 [N]; w = q * scale
    int4     uint8 [N, K/2]             group int8 [N, K/32], scale f32 [N];
                                        w = (q - 8) * group * scale, q in 1..15, group in 1..18
    fp8      float8_e4m3fn [N, K]       scale f32 [ceil(N/128), ceil(K/128)]; w = q * scale

int4: each run of 64 inputs takes 32 bytes. Its first 32 inputs (one group) are the low nibbles, the
other 32 the high ones. (q - 8) * group is an exact int8, so the product is the int8 one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Num, Shaped, UInt8

from .dispatch import dispatch
from .grouped_matmul import SCALE_BLOCK, dequantize

INT4_GROUP = 32
DIGITS = 3
DIGIT_BASE = 254.0

Weights = tuple[jax.Array, ...]
"""A kernel and its companions, as this module's table lists them."""

_FORMATS = {"int8": "int8", "uint8": "int4", "float8_e4m3fn": "fp8"}


def weight_format(weights: Weights) -> str:
    """ "float", "int8", "int4" or "fp8"; ValueError for a kernel of any other dtype."""
    dtype = jnp.dtype(weights[0].dtype)
    if dtype.name not in _FORMATS and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"matmul: no products with weights of {dtype}")
    return _FORMATS.get(dtype.name, "float")


def matmul(
    x: Float[Array, "*rows K"],
    weights: Weights,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows N"]:
    """x times the transposed weights, summed in float32 or wider steps of the inputs' dtype.

    out_dtype: of the result; None: x's dtype, or with float weights the wider one of the two.
    Raises ValueError for operands that do not fit together.
    """
    check_weights(x.shape, weights)
    if out_dtype is None:
        out_dtype = jnp.result_type(x, weights[0]) if len(weights) == 1 else x.dtype
    flat = x.reshape(-1, x.shape[-1])
    out = dispatch(
        "matmul", flat, weights, out_dtype=jnp.dtype(out_dtype), implementation=implementation
    )
    return out.reshape(*x.shape[:-1], out.shape[-1])


def check_weights(x_shape: tuple[int, ...], weights: Weights) -> None:
    """ValueError unless the weights are complete and have as many inputs as x.

    Compiled implementations read memory by these shapes.
    """
    format, kernel = weight_format(weights), weights[0]
    k, n = x_shape[-1], kernel.shape[0]
    width = k // 2 if format == "int4" else k
    blocks = (-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
    companions = {
        "float": [],
        "int8": [((n,), jnp.float32)],
        "int4": [((n, k // INT4_GROUP), jnp.int8), ((n,), jnp.float32)],
        "fp8": [(blocks, jnp.float32)],
    }[format]
    wanted = [((n, width), kernel.dtype), *companions]
    given = [(part.shape, part.dtype) for part in weights]
    if given != [(shape, jnp.dtype(dtype)) for shape, dtype in wanted]:
        raise ValueError(f"matmul: x {x_shape} and {format} weights {given} do not fit together")
    if format == "int4" and k % (2 * INT4_GROUP):
        raise ValueError(f"matmul: int4 needs a multiple of {2 * INT4_GROUP} inputs, got {k}")


def dot_last(
    x: Num[Array, "*rows K"], w: Num[Array, "N K"], out_dtype: jnp.dtype | None = None
) -> Num[Array, "*rows N"]:
    """Contracts the last dimension of both, so that weights keep their checkpoint layout."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=out_dtype)


def matmul_xla(
    x: Float[Array, "M K"], weights: Weights, *, out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """Quantised weights are converted on the way into the product.

    fp8 and int4 ones are widened first: on a GPU XLA writes them out and reads them again.
    """
    kernel, *companions = weights
    match weight_format(weights):
        case "float":
            return dot_last(x, kernel, out_dtype)
        case "int8":
            return (dot_last(x, kernel.astype(x.dtype), jnp.float32) * companions[0]).astype(
                out_dtype
            )
        case "int4":
            group, scale = companions
            halves = jnp.stack(int4_halves(kernel, group), axis=-2).reshape(kernel.shape[0], -1)
            wide = (halves.astype(jnp.float32) * scale[:, None]).astype(x.dtype)
            return dot_last(x, wide, out_dtype)
        case _:
            return dot_last(x, dequantize(kernel, companions[0], x.dtype), out_dtype)


# --- integer products without loss, for CPUs without compiled ones --------------------------------


def digits_unsupported_reason(
    x: jax.Array, weights: Weights, *, out_dtype: jnp.dtype
) -> str | None:
    """Why the weights have no product in int8 digits; None if they have one."""
    del x, out_dtype
    format = weight_format(weights)
    return None if format in ("int8", "int4") else f"weights in {format}"


def matmul_digits(
    x: Float[Array, "M K"], weights: Weights, *, out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """int8 instructions without loss: x as three int8 digits in base 254 (relative error 2^-23).

    All digits go through one int8 x int8 -> int32 product and the sums are put together in float32.
    One byte is read per weight and no dequantised one is written
    (docs/decisions/010-quantised-linears-on-cpu.md).
    """
    digits, step = int8_digits(x)
    rows = digits.reshape(DIGITS * x.shape[0], x.shape[1])
    if weight_format(weights) == "int8":
        sums = dot_last(rows, weights[0], jnp.int32)
    else:
        pairs = rows.reshape(rows.shape[0], -1, 2, INT4_GROUP)
        halves = [w.reshape(weights[0].shape) for w in int4_halves(*weights[:2])]
        sums = sum(
            dot_last(pairs[:, :, i].reshape(rows.shape[0], -1), w, jnp.int32)
            for i, w in enumerate(halves)
        )
    total = add_digits(sums.reshape(DIGITS, x.shape[0], -1))
    return (total * step * weights[-1]).astype(out_dtype)


def int8_digits(
    x: Float[Array, "M K"],
) -> tuple[Int8[Array, "digits M K"], Float[Array, "M 1"]]:
    """(digits, step) with x = step * sum_i digits_i / 254^i."""
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    step = jnp.where(top == 0, 1.0, top / 127.0)
    rest, digits = x / step, []
    for _ in range(DIGITS):
        digit = jnp.rint(rest)
        digits.append(digit.astype(jnp.int8))
        rest = (rest - digit) * DIGIT_BASE
    return jnp.stack(digits), step


def add_digits(sums: Shaped[Array, "digits M N"]) -> Float[Array, "M N"]:
    """int32 products of the digits -> their float32 sum, in units of the step."""
    return sum(sums[i].astype(jnp.float32) * DIGIT_BASE**-i for i in reversed(range(DIGITS)))


def int4_halves(
    q: UInt8[Array, "*stack N half_K"], group: Int8[Array, "*stack N groups"]
) -> tuple[Int8[Array, "*stack N pairs 32"], Int8[Array, "*stack N pairs 32"]]:
    """The weights of the even groups and of the odd ones, in units of the row's scale."""
    packed = q.reshape(*q.shape[:-1], -1, INT4_GROUP)
    factors = group.reshape(*group.shape[:-1], -1, 2, 1)
    low, high = (packed & 15).astype(jnp.int8) - 8, (packed >> 4).astype(jnp.int8) - 8
    return low * factors[..., 0, :], high * factors[..., 1, :]
