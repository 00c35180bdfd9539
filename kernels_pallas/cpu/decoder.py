"""All layers of a dense decoder's decode step as one custom call on a CPU (decoder.cc;
docs/decisions/012-cpu-decode-step.md)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas.cpu import native
from deepinfer_jax.kernels_pallas.cpu.matmul import native_format
from deepinfer_jax.kernels_pallas.decoder_layers import LayerWeights, LinearWeights, Result, Rows

_WIDTH = 16
_MAX_GROUP = 16  # query heads per key/value head
_MAX_ROWS = {"f32": 64, "bf16": 32, "int8": 64, "int4": 64}
"""From more rows on ops of their own are faster: products on XLA, or no longer bound by what
surrounds them."""

Pools = tuple[Float[Array, "N bs KH D"], ...]


def unsupported_reason(
    x: Float[Array, "T hidden"],
    rows: Rows,
    layers: tuple[LayerWeights, ...],
    last_norm: Float[Array, " hidden"],
    keys: Pools,
    values: Pools,
    *,
    row_per_sequence: bool,
    eps: float,
    scale: float,
    unfused: Callable[[], Result],
) -> str | None:
    """Why the custom call cannot take these arguments; None if it can."""
    del rows, last_norm, eps, scale, unfused
    if not row_per_sequence:
        return "not one row per sequence"
    return (
        _weights_unsupported_reason(x.shape[0], layers)
        or _shapes_unsupported_reason(x, layers[0], keys, values)
        or native.unsupported_reason("decoder")
    )


def _linears(layer: LayerWeights) -> tuple[LinearWeights, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _weights_unsupported_reason(rows: int, layers: tuple[LayerWeights, ...]) -> str | None:
    if shards := max(layer.shards for layer in layers) - 1:
        return f"linear layers split over {shards + 1} ranks"
    if any(linear.bias is not None for layer in layers for linear in _linears(layer)[1:]):
        return "biases beside those of q, k and v"
    kernels = [linear.parts for layer in layers for linear in _linears(layer)]
    formats = [native_format(parts) for parts in kernels]
    unknown = {str(p[0].dtype) for p, f in zip(kernels, formats, strict=True) if f is None}
    if unknown:
        return f"no products with weights of {', '.join(sorted(unknown))}"
    limit = min(_MAX_ROWS[f] for f in formats if f)
    return f"ops of their own are faster for more than {limit} rows" if rows > limit else None


def _shapes_unsupported_reason(
    x: jax.Array, layer: LayerWeights, keys: Pools, values: Pools
) -> str | None:
    pools = (*keys, *values)
    if any(p.dtype not in (jnp.float32, jnp.bfloat16) for p in pools):
        return f"pools must be float32 or bfloat16, got {keys[0].dtype}"
    heads, kv_heads, d, inner = _sizes(layer, keys[0])
    if x.shape[1] % _WIDTH or d % _WIDTH or inner % _WIDTH:
        return (
            f"hidden {x.shape[1]}, head {d} and inner {inner} sizes must be multiples of {_WIDTH}"
        )
    if heads // kv_heads > _MAX_GROUP or any(p.shape[2:] != keys[0].shape[2:] for p in pools):
        return f"at most {_MAX_GROUP} query heads per key/value head, and pools alike, expected"
    return None


def _sizes(layer: LayerWeights, pool: jax.Array) -> tuple[int, int, int, int]:
    """(query heads, key/value heads, head size, inner size)"""
    kv_heads, d = pool.shape[2:]
    rows = layer.qkv.parts[0].shape[0]
    return rows // d - 2 * kv_heads, kv_heads, d, layer.gate_up.parts[0].shape[0] // 2


def _operands(layer: LayerWeights) -> list[jax.Array]:
    """A layer's operands in the order in which decoder.cc reads them."""
    optional = (layer.qkv.bias, layer.q_norm, layer.k_norm)
    attention = [layer.attn_norm, *layer.qkv.parts, *(o for o in optional if o is not None)]
    mlp = [layer.mlp_norm, *layer.gate_up.parts, *layer.down.parts]
    return [*attention, *layer.out.parts, *mlp]


def decoder_layers_native(
    x: Float[Array, "T hidden"],
    rows: Rows,
    layers: tuple[LayerWeights, ...],
    last_norm: Float[Array, " hidden"],
    keys: Pools,
    values: Pools,
    *,
    row_per_sequence: bool,
    eps: float,
    scale: float,
    unfused: Callable[[], Result],
) -> Result:
    """See `decoder_layers`; activations stay float32 from layer to layer."""
    del row_per_sequence, unfused
    heads, _, _, inner = _sizes(layers[0], keys[0])
    f32, i32 = jnp.float32, jnp.int32
    operands = [x.astype(f32), rows.cos.astype(f32), rows.sin.astype(f32)]
    operands += [a.astype(i32) for a in (rows.block_tables, rows.kv_lens, rows.write_slots)]
    operands.append(last_norm)
    aliases, pools = {}, []
    for layer, *pair in zip(layers, keys, values, strict=True):
        operands += _operands(layer)
        for pool in pair:
            aliases[len(operands)] = 1 + len(pools)
            operands.append(pool)
            pools.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    flags = {f"window_{i}": layer.window for i, layer in enumerate(layers) if layer.window}
    flags |= {"heads": heads, "inner": inner}
    flags |= {"biased": layers[0].qkv.bias is not None, "normed": layers[0].q_norm is not None}
    call = jax.ffi.ffi_call(
        native.custom_call("decoder"),
        [jax.ShapeDtypeStruct(x.shape, f32), *pools],
        input_output_aliases=aliases,
    )
    hidden, *pools = call(
        *operands,
        eps=np.float32(eps),
        scale=np.float32(scale),
        **{name: np.int64(value) for name, value in flags.items()},
    )
    return Result(hidden.astype(x.dtype), tuple(pools[0::2]), tuple(pools[1::2]))
