"""Copying blocks out of pools and into them on a CPU in C++ (blocks.cc): all pools in one call,
with XLA's threads."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels_pallas.cpu import native

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
)


def unsupported_reason(
    caches: Sequence[Sequence[jax.Array]], *_: object, **__: object
) -> str | None:
    """Why the compiled copy cannot take these pools; None if it can."""
    unknown = {np.dtype(p.dtype).name for pools in caches for p in pools} - {*DTYPES}
    if unknown:
        return f"pools of {', '.join(sorted(unknown))}"
    return native.unsupported_reason("blocks")


def take_native(
    caches: Sequence[Sequence[jax.Array]], ids: jax.Array, count: jax.Array
) -> list[jax.Array]:
    """See `take_blocks`; rows from `count` on hold whatever the memory held."""
    out = [
        jax.ShapeDtypeStruct((ids.shape[0], len(pools), *pools[0].shape[1:]), pools[0].dtype)
        for pools in caches
    ]
    call = jax.ffi.ffi_call(native.custom_call("blocks"), out)
    flat = [p for pools in caches for p in pools]
    return call(count.astype(jnp.int32).reshape(1), ids.astype(jnp.int32), *flat, put=np.int64(0))


def put_native(
    caches: Sequence[Sequence[jax.Array]], ids: jax.Array, rows: Sequence[jax.Array]
) -> list[list[jax.Array]]:
    """See `put_blocks`."""
    flat = [p for pools in caches for p in pools]
    out = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in flat]
    call = jax.ffi.ffi_call(
        native.custom_call("blocks"), out, input_output_aliases={2 + i: i for i in range(len(flat))}
    )
    written = iter(
        call(
            jnp.full(1, ids.shape[0], jnp.int32),
            ids.astype(jnp.int32),
            *flat,
            *rows,
            put=np.int64(1),
        )
    )
    return [[next(written) for _ in pools] for pools in caches]
