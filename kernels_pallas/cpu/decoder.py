"""All layers of a dense decoder's decode step as one custom call on a CPU (decoder.cc;
docs/decisions/012-cpu-decode-step.md)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels_pallas.cpu import matmul, native
from deepinfer_jax.kernels_pallas.decoder_layers import LayerWeights, Result

_WIDTH = 16
_MAX_GROUP = 16  # query heads per key/value head
_MAX_ROWS = {"f32": 64, "bf16": 32, "int8": 64, "int4": 64}
"""From more rows on separate ops are faster: products on XLA, or no longer bound by what surrounds
them."""


def unsupported_reason(
    x, rows, layers: tuple[LayerWeights, ...], last_norm, keys, values, **_
) -> str | None:
    """Why the custom call cannot take these arguments; None if it can."""
    formats = {jnp.dtype(dtype): name for name, dtype in matmul.FORMATS.items()}
    kernels = [w[0] for layer in layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    unknown = {str(k.dtype) for k in kernels if jnp.dtype(k.dtype) not in formats}
    if unknown:
        return f"no products with weights of {', '.join(sorted(unknown))}"
    limit = min(_MAX_ROWS[formats[jnp.dtype(k.dtype)]] for k in kernels)
    if x.shape[0] > limit:
        return f"separate ops are faster for more than {limit} rows of {kernels[0].dtype}"
    if any(p.dtype not in (jnp.float32, jnp.bfloat16) for p in (*keys, *values)):
        return f"pools must be float32 or bfloat16, got {keys[0].dtype}"
    heads, kv_heads, d, inner = _sizes(layers[0], keys[0])
    if x.shape[1] % _WIDTH or d % _WIDTH or inner % _WIDTH:
        return (
            f"hidden {x.shape[1]}, head {d} and inner {inner} sizes must be multiples of {_WIDTH}"
        )
    if heads // kv_heads > _MAX_GROUP or any(
        k.shape[2:] != keys[0].shape[2:] for k in (*keys, *values)
    ):
        return f"at most {_MAX_GROUP} query heads per key/value head, and pools alike, expected"
    return native.unsupported_reason("decoder")


def _sizes(layer: LayerWeights, pool) -> tuple[int, int, int, int]:
    """(query heads, key/value heads, head size, inner size)"""
    kv_heads, d = pool.shape[2:]
    return layer.qkv[0].shape[0] // d - 2 * kv_heads, kv_heads, d, layer.gate_up[0].shape[0] // 2


def decoder_layers_native(
    x, rows, layers, last_norm, keys, values, *, eps, scale, unfused
) -> Result:
    """See `decoder_layers`; activations stay float32 from layer to layer."""
    heads, _, _, inner = _sizes(layers[0], keys[0])
    f32, i32 = jnp.float32, jnp.int32
    operands = [x.astype(f32), rows.cos.astype(f32), rows.sin.astype(f32)]
    operands += [a.astype(i32) for a in (rows.block_tables, rows.kv_lens, rows.write_slots)] + [
        last_norm
    ]
    aliases, pools = {}, []
    for layer, *pair in zip(layers, keys, values, strict=True):
        optional = (layer.qkv_bias, layer.q_norm, layer.k_norm)
        operands += [layer.attn_norm, *layer.qkv, *(o for o in optional if o is not None)]
        operands += [*layer.out, layer.mlp_norm, *layer.gate_up, *layer.down]
        for pool in pair:
            aliases[len(operands)] = 1 + len(pools)
            operands.append(pool)
            pools.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    windows = {
        f"window_{i}": np.int64(layer.window) for i, layer in enumerate(layers) if layer.window
    }
    flags = {
        "biased": layers[0].qkv_bias is not None,
        "normed": layers[0].q_norm is not None,
        "heads": heads,
        "inner": inner,
    }
    call = jax.ffi.ffi_call(
        native.custom_call("decoder"),
        [jax.ShapeDtypeStruct(x.shape, f32), *pools],
        input_output_aliases=aliases,
    )
    hidden, *pools = call(
        *operands,
        eps=np.float32(eps),
        scale=np.float32(scale),
        **windows,
        **{name: np.int64(v) for name, v in flags.items()},
    )
    return Result(hidden.astype(x.dtype), tuple(pools[0::2]), tuple(pools[1::2]))
