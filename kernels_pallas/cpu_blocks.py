"""Copying blocks out of pools and into them on a CPU in C++ (cpu_blocks.cc): all pools in one call, with XLA's threads."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from . import cpu_native

DTYPES = ("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32")


def refusal(pools: Sequence[jax.Array], *_, **__) -> str | None:
    """Why the compiled copy cannot take these pools; None if it can."""
    unknown = {np.dtype(p.dtype).name for p in pools} - {*DTYPES}
    if unknown:
        return f"pools of {', '.join(sorted(unknown))}"
    status = cpu_native.status("blocks")
    return None if status.native else status.reason


def take_native(pools: Sequence[jax.Array], ids: jax.Array, count: jax.Array) -> list[jax.Array]:
    """See `take_blocks`; rows from `count` on hold whatever the memory held."""
    out = [jax.ShapeDtypeStruct((ids.shape[0], *p.shape[1:]), p.dtype) for p in pools]
    call = jax.ffi.ffi_call(cpu_native.custom_call("blocks"), out)
    return call(count.astype(jnp.int32).reshape(1), ids.astype(jnp.int32), *pools, put=np.int64(0))


def put_native(pools: Sequence[jax.Array], ids: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
    """See `put_blocks`."""
    out = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools]
    call = jax.ffi.ffi_call(cpu_native.custom_call("blocks"), out, input_output_aliases={2 + i: i for i in range(len(pools))})
    return call(jnp.full(1, ids.shape[0], jnp.int32), ids.astype(jnp.int32), *pools, *rows, put=np.int64(1))
