"""Manifold-constrained hyper-connections (Xie et al., 2026): the residual is a few streams, mixed
around every sublayer by weights that depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deepinfer_jax.models.layers.param import param


@dataclass(frozen=True)
class HyperConfig:
    """streams: residual streams of a token. iterations: of Sinkhorn-Knopp. eps: added where it
    divides, and to the weights that merge streams. norm_eps: of the streams' RMS norm."""

    streams: int
    iterations: int
    eps: float
    norm_eps: float

    def __post_init__(self) -> None:
        if self.streams < 1 or self.iterations < 1:
            raise ValueError(
                f"hc_mult and hc_sinkhorn_iters must be >= 1, got {self.streams} and"
                f" {self.iterations}"
            )


def _mixes(
    streams: Float[Array, "T M D"], fn: Float[Array, "N MD"], norm_eps: float
) -> Float[Array, "T N"]:
    """The normalised streams, projected: what all weights are made of, float32."""
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    mean_square = jnp.mean(flat * flat, axis=-1, keepdims=True)
    product = jax.lax.dot_general(
        flat, fn, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
    return product * jax.lax.rsqrt(mean_square + norm_eps)


def _merge(streams: Float[Array, "T M D"], weights: Float[Array, "T M"]) -> Float[Array, "T D"]:
    merged = jnp.einsum("tm,tmd->td", weights, streams.astype(jnp.float32))
    return merged.astype(streams.dtype)


def sinkhorn(logits: Float[Array, "T M M"], iterations: int, eps: float) -> Float[Array, "T M M"]:
    """Nearly doubly stochastic matrices: softmax of the rows, then columns and rows are divided by
    their sums in turn, columns first and last."""
    mixed = jax.nn.softmax(logits, axis=-1) + eps
    mixed = mixed / (mixed.sum(-2, keepdims=True) + eps)

    def once(_: int, m: jax.Array) -> jax.Array:
        m = m / (m.sum(-1, keepdims=True) + eps)
        return m / (m.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, once, mixed)


class HyperConnection(nnx.Module):
    """The streams around one sublayer: `read` merges them into its input and keeps what `write`
    needs to put its output back."""

    def __init__(self, hidden: int, config: HyperConfig) -> None:
        m = config.streams
        self.config = config
        self.fn = param(((2 + m) * m, m * hidden), jnp.float32)
        self.base = param(((2 + m) * m,), jnp.float32, init="zeros")
        self.scale = param((3,), jnp.float32, init="ones")

    def read(
        self, streams: Float[Array, "T M D"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T M"], Float[Array, "T M M"]]:
        """(the sublayer's input, weight of its output per stream, mixing of the old streams)."""
        c = self.config
        m, base, scale = c.streams, self.base[...], self.scale[...]
        mixes = _mixes(streams, self.fn[...], c.norm_eps)
        pre = jax.nn.sigmoid(mixes[:, :m] * scale[0] + base[:m]) + c.eps
        post = 2 * jax.nn.sigmoid(mixes[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mixes[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(-1, m, m)
        return _merge(streams, pre), post, sinkhorn(comb, c.iterations, c.eps)

    @staticmethod
    def write(
        streams: Float[Array, "T M D"],
        output: Float[Array, "T D"],
        post: Float[Array, "T M"],
        comb: Float[Array, "T M M"],
    ) -> Float[Array, "T M D"]:
        """stream n = output * post[n] + sum over m of comb[m, n] * stream m."""
        kept = jnp.einsum("tmn,tmd->tnd", comb, streams.astype(jnp.float32))
        added = post[:, :, None] * output.astype(jnp.float32)[:, None, :]
        return (kept + added).astype(streams.dtype)


class HyperHead(nnx.Module):
    """[T, M, D] -> [T, D]: the streams merged for the output."""

    def __init__(self, hidden: int, config: HyperConfig) -> None:
        self.config = config
        self.fn = param((config.streams, config.streams * hidden), jnp.float32)
        self.base = param((config.streams,), jnp.float32, init="zeros")
        self.scale = param((1,), jnp.float32, init="ones")

    def __call__(self, streams: Float[Array, "T M D"]) -> Float[Array, "T D"]:
        mixes = _mixes(streams, self.fn[...], self.config.norm_eps)
        weights = jax.nn.sigmoid(mixes * self.scale[...] + self.base[...]) + self.config.eps
        return _merge(streams, weights)
