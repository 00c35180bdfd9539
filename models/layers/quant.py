"""Weight storage formats of linear layers: what is stored, how it is made at load, and the matmul
that reads it.

A format stores a kernel [N, K] and companions. Its functions: `storage` (shapes), `quantize`
(NumPy, at load, row by row so that rows of several tensors can be fused), `dequantize` and
`matmul`.

int8   kernel int8 [N, K], scale float32 [N]                                    w = q * scale
q in -127..127 int4   kernel uint8 [N, K/2], group int8 [N, K/32], scale float32 [N]           w =
(q - 8) * group * scale, q - 8 in -7..7 fp8    kernel float8_e4m3fn [N, K], scale float32
[ceil(N/128), ceil(K/128)]    w = q * scale, as DeepSeek-V3 is published

int4: each run of 64 inputs takes 32 bytes: its first 32 inputs (one group) are the low nibbles, the
other 32 the high ones. `group` is 1..18, so (q - 8) * group is an exact int8 and the matmul is the
int8 one.

On a CPU products run in compiled code (kernels_pallas/cpu/matmul.py;
docs/decisions/011-cpu-matmul.md). Where that cannot be built, the int8 product is computed with
int8 instructions and without loss: a float32 activation is written as three int8 digits in base 254
(relative error 2^-23), all digits go through one int8 x int8 -> int32 product, and the sums are put
together in float32. That reads one byte per weight and never writes a dequantised one. Off the CPU
int8 and int4 weights are converted on the way into the matmul; fp8 goes to
`kernels_pallas.block_scaled_matmul`. Measured: docs/decisions/010-quantised-linears-on-cpu.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from deepinfer_jax.kernels_pallas import block_scaled_matmul
from deepinfer_jax.kernels_pallas.cpu import matmul as cpu_matmul

INT4_GROUP = 32
INT4_MAX_GROUP_FACTOR = 18  # 7 * 18 = 126 fits int8
FP8_BLOCK = 128
FP8_MAX = 448.0
DIGITS = 3
DIGIT_BASE = 254.0


def dot_last(x: jax.Array, w: jax.Array, preferred: jnp.dtype | None = None) -> jax.Array:
    """x [..., K] . w [N, K] -> [..., N]: contracts the last dimension of both, so weights keep
    their checkpoint layout."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=preferred)


def float_matmul(x: jax.Array, w: jax.Array, preferred: jnp.dtype | None = None) -> jax.Array:
    """`dot_last` for float weights, by the compiled CPU product where that is the faster one."""
    if not cpu_matmul.preferred(w.dtype, x.size // x.shape[-1]):
        return dot_last(x, w, preferred)
    out = jnp.result_type(x, w) if preferred is None else preferred

    def native(x: jax.Array, w: jax.Array) -> jax.Array:
        return cpu_matmul.matmul_nt(x, w).astype(out)

    def xla(x: jax.Array, w: jax.Array) -> jax.Array:
        return dot_last(x, w, preferred)

    return on_platform(native, xla, x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


def on_platform(cpu: Callable, other: Callable, *args: jax.Array) -> jax.Array:
    """`cpu(*args)` where the program is compiled for a CPU, `other(*args)` elsewhere."""
    return jax.lax.platform_dependent(*args, cpu=cpu, default=other)


# --- int8 -----------------------------------------------------------------------------------------


def _int8_storage(n: int, k: int) -> tuple:
    return ((n, k), jnp.int8), ((n,), jnp.float32)


def _int8_quantize(w: np.ndarray) -> tuple[np.ndarray, ...]:
    scale = np.abs(w).max(axis=-1) / 127.0
    q = np.rint(w / np.where(scale == 0, 1.0, scale)[..., None])
    return q.astype(np.int8), scale.astype(np.float32)


def _int8_dequantize(dtype: jnp.dtype, q: jax.Array, scale: jax.Array) -> jax.Array:
    return (q.astype(jnp.float32) * scale[..., None]).astype(dtype)


def int8_digits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [M, K] -> (int8 [DIGITS, M, K], step float32 [M, 1]) with x = step * sum_i digits_i /
    254^i."""
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    step = jnp.where(top == 0, 1.0, top / 127.0)
    rest, digits = x / step, []
    for _ in range(DIGITS):
        digit = jnp.rint(rest)
        digits.append(digit.astype(jnp.int8))
        rest = (rest - digit) * DIGIT_BASE
    return jnp.stack(digits), step


def add_digits(sums: jax.Array) -> jax.Array:
    """int32 [DIGITS, M, N] products of the digits -> float32 [M, N], in units of the step."""
    return sum(sums[i].astype(jnp.float32) * DIGIT_BASE**-i for i in reversed(range(DIGITS)))


def int8_matmul(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., K], q int8 [N, K], scale [N] -> [..., N] in x's dtype."""

    def native(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
        return cpu_matmul.matmul_nt(x, q, scale=scale, format="int8").astype(x.dtype)

    def with_digits(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
        digits, step = int8_digits(x)
        sums = dot_last(digits.reshape(-1, x.shape[-1]), q, jnp.int32)
        return (add_digits(sums.reshape(DIGITS, x.shape[0], -1)) * step * scale).astype(x.dtype)

    def converted(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
        return (dot_last(x, q.astype(x.dtype), jnp.float32) * scale).astype(x.dtype)

    cpu = native if cpu_matmul.in_use() else with_digits
    flat = on_platform(cpu, converted, x.reshape(-1, x.shape[-1]), q, scale)
    return flat.reshape(*x.shape[:-1], -1)


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


def int4_halves(q: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two int8 [..., K/64, 32]: the weights, in units of the row's scale, of the even groups and of
    the odd ones."""
    packed = q.reshape(*q.shape[:-1], -1, INT4_GROUP)
    factors = group.reshape(*group.shape[:-1], -1, 2, 1)
    low, high = (packed & 15).astype(jnp.int8) - 8, (packed >> 4).astype(jnp.int8) - 8
    return low * factors[..., 0, :], high * factors[..., 1, :]


def _int4_dequantize(
    dtype: jnp.dtype, q: jax.Array, group: jax.Array, scale: jax.Array
) -> jax.Array:
    values = jnp.stack(int4_halves(q, group), axis=-2)
    return _int8_dequantize(dtype, values.reshape(*q.shape[:-1], -1), scale)


def int4_matmul(x: jax.Array, q: jax.Array, group: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., K], q uint8 [N, K/2], group int8 [N, K/32], scale [N] -> [..., N] in x's dtype."""

    def native(x: jax.Array, q: jax.Array, group: jax.Array, scale: jax.Array) -> jax.Array:
        return cpu_matmul.matmul_nt(x, q, group=group, scale=scale, format="int4").astype(x.dtype)

    def with_digits(x: jax.Array, q: jax.Array, group: jax.Array, scale: jax.Array) -> jax.Array:
        digits, step = int8_digits(x)
        rows = digits.reshape(DIGITS * x.shape[0], -1, 2, INT4_GROUP)
        halves = [w.reshape(q.shape) for w in int4_halves(q, group)]
        sums = sum(
            dot_last(rows[:, :, i].reshape(rows.shape[0], -1), w, jnp.int32)
            for i, w in enumerate(halves)
        )
        return (add_digits(sums.reshape(DIGITS, x.shape[0], -1)) * step * scale).astype(x.dtype)

    def converted(x: jax.Array, q: jax.Array, group: jax.Array, scale: jax.Array) -> jax.Array:
        return dot_last(x, _int4_dequantize(x.dtype, q, group, scale))

    cpu = native if cpu_matmul.in_use() else with_digits
    flat = on_platform(cpu, converted, x.reshape(-1, x.shape[-1]), q, group, scale)
    return flat.reshape(*x.shape[:-1], -1)


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


def fp8_matmul(x: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., K], q float8_e4m3fn [N, K], scale [ceil(N/128), ceil(K/128)] -> [..., N]."""
    return block_scaled_matmul(x.reshape(-1, x.shape[-1]), q, scale).reshape(*x.shape[:-1], -1)


# --- table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantFormat:
    """One storage format; "parts" are the kernel and then the companions, named `<kernel><suffix>`,
    in this order everywhere.

    storage(n, k) -> (shape, dtype) of each part; quantize(w float32 [..., n, k]) -> parts;
    dequantize(dtype, *parts) -> [..., n, k] (leading dimensions allowed, as for stacked experts);
    matmul(x [..., k], *parts) -> [..., n]. row_block, col_block: rows and inputs that a tp split
    must keep together (col_block 1: any). packing: inputs per stored kernel element. random_std:
    standard deviation of a kernel of random bytes, in units of the scale.
    """

    name: str
    suffixes: tuple[str, ...]
    storage: Callable
    quantize: Callable
    dequantize: Callable
    matmul: Callable
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
            int8_matmul,
            random_std=73.9,
        ),
        QuantFormat(
            "int4",
            ("_group", "_scale"),
            _int4_storage,
            _int4_quantize,
            _int4_dequantize,
            int4_matmul,
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
            fp8_matmul,
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
