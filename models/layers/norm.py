"""RMS normalisation (Zhang and Sennrich, 2019) and layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.models.layers.param import param


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32, returned in x's
    dtype."""
    xf = x.astype(jnp.float32)
    scaled = xf * jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = param((dim,), dtype, init="ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, in float32,
    returned in x's dtype."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = param((dim,), dtype, init="ones")
        self.bias = param((dim,), dtype, init="zeros")

    def __call__(self, x: jax.Array) -> jax.Array:
        xf = x.astype(jnp.float32)
        centred = xf - jnp.mean(xf, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(variance + self.eps)
        return (scaled * self.weight[...] + self.bias[...]).astype(x.dtype)
