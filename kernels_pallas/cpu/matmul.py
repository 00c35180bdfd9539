"""Matrix products with float32, bfloat16, int8 and 4-bit weights on a CPU, at the speed of its
memory: C++ called by XLA.

Decode reads every weight once for a few rows. XLA's CPU dots reach the memory's speed for none of
these formats (docs/decisions/011-cpu-matmul.md), so `matmul.cc` is compiled on first use
(cpu_native.py). Where it cannot be, callers use their XLA formulation: `in_use()` decides that,
`status()` says why.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels_pallas.cpu import native

INT4_GROUP = 32
FORMATS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8, "int4": jnp.uint8}
MAX_ROWS = {"f32": 64, "bf16": 8, "int8": 1 << 30, "int4": 1 << 30}
"""From more rows on XLA's float products, which pack the weights first, are faster
(docs/decisions/011-cpu-matmul.md)."""


def matmul_nt(
    x: jax.Array,
    weight: jax.Array,
    *,
    scale: jax.Array | None = None,
    group: jax.Array | None = None,
    format: str | None = None,
) -> jax.Array:
    """`x[M, K] . weight[N, K]^T` -> float32 `[M, N]`, activations and sums in float32, by the
    compiled custom call.

    format (None: by the weight's dtype) and what it stores: "f32", "bf16"  weight [N, K] "int8"
      weight int8 [N, K], scale float32 [N]                                w = q * scale "int4"
      weight uint8 [N, K/2], group int8 [N, K/32], scale float32 [N]       w = (q - 8) * group *
      scale,
                     q 1..15, group 1..18 ((q - 8) * group is an int8); each run of 64 inputs is 32
                     bytes, its
                     first 32 inputs the low nibbles, the other 32 the high ones
    Raises ValueError for operands that do not fit, RuntimeError where the custom call is not in use
    (see `in_use`).
    """
    names = {jnp.dtype(dtype): name for name, dtype in FORMATS.items()}
    found = names.get(jnp.dtype(weight.dtype))
    if found is None or format not in (None, found):
        raise ValueError(
            f"cpu_matmul: format {format!r} does not fit weights of {weight.dtype}; formats:"
            f" {', '.join(FORMATS)}"
        )
    operands = _companions(found, x.shape, weight.shape, scale, group)
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(native.custom_call("matmul"), out, vmap_method="sequential")(
        x.astype(jnp.float32), weight, *operands
    )


def _companions(format: str, x_shape, w_shape, scale, group) -> list[jax.Array]:
    """The operands after the weight, checked: the custom call reads memory by these shapes."""
    n, k = w_shape[0], x_shape[-1]
    wanted = {"int8": {"scale": (n,)}, "int4": {"group": (n, k // INT4_GROUP), "scale": (n,)}}.get(
        format, {}
    )
    given = {name: v.shape for name, v in (("group", group), ("scale", scale)) if v is not None}
    packing = 2 if format == "int4" else 1
    if (
        len(x_shape) != 2
        or tuple(w_shape) != (n, k // packing)
        or given != wanted
        or (format == "int4" and k % (2 * INT4_GROUP))
    ):
        raise ValueError(
            f"cpu_matmul {format}: x {x_shape}, weight {w_shape} and {given} do not fit together,"
            f" {wanted} expected"
        )
    dtypes = {"group": jnp.int8, "scale": jnp.float32}
    parts = {"group": group, "scale": scale}
    for name in wanted:
        if parts[name].dtype != dtypes[name]:
            raise ValueError(
                f"cpu_matmul {format}: {name} must be {jnp.dtype(dtypes[name])}, got"
                f" {parts[name].dtype}"
            )
    return [parts[name] for name in wanted]


def in_use() -> bool:
    """Whether programs traced now can call `matmul_nt`."""
    return native.in_use("matmul")


def status() -> native.Status:
    """What runs CPU products in this process, and why (`native.status`)."""
    return native.status("matmul")


def preferred(weight_dtype: jnp.dtype, rows: int) -> bool:
    """Whether `rows` rows times weights of this type should go through `matmul_nt`: it can, and no
    XLA product is faster."""
    limits = {jnp.dtype(FORMATS[name]): limit for name, limit in MAX_ROWS.items()}
    dtype = jnp.dtype(weight_dtype)
    return dtype in limits and rows <= limits[dtype] and in_use()
