"""Attention of DeepSeek-V4 (technical report, section 2.3): each head attends to a sliding window
and, by layer type, to compressed entries of everything before.

One latent per token is key and value of all heads. One softmax runs over window and entries, with a
logit per head that only takes weight away (a sink). The output's rotated channels are rotated back,
since values are rotated with their keys, and leave through a grouped low-rank projection.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas import KeySource, index_topk, sparse_attention
from deepinfer_jax.models.base import CacheSpec, PagedCache, ParallelAxes, StateCache
from deepinfer_jax.models.layers.linear import Linear
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.param import param
from deepinfer_jax.models.layers.rope import RopeConfig
from deepinfer_jax.models.layers.sparse.compressor import (
    Compressor,
    CompressorConfig,
)
from deepinfer_jax.models.layers.sparse.indexer import IndexerConfig
from deepinfer_jax.models.layers.sparse.rings import StepRows
from deepinfer_jax.models.layers.sparse.tail_rope import rotate_tail
from deepinfer_jax.models.layers.sparse.window import paged_window, window_source

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
LAYER_TYPES = (SLIDING, SPARSE, HEAVY)


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """Sizes of the attention of all layers. ratios: tokens per entry, by layer type. rollback:
    tokens a sequence may be taken back without recomputing anything.

    paged: windows lie in pages, not in rings, and blocks hold all that a sequence needs to start at
    their end (docs/decisions/032-v4-windows.md).
    """

    hidden: int
    num_heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    ratios: tuple[tuple[str, int], ...]
    rope: RopeConfig
    compress_rope: RopeConfig
    indexer: IndexerConfig
    norm_eps: float
    rollback: int = 8
    paged: bool = False

    def __post_init__(self) -> None:
        if (self.num_heads * self.head_dim) % self.out_groups or self.window < 1:
            raise ValueError(
                f"{self.num_heads} heads of {self.head_dim} do not divide into"
                f" {self.out_groups} output groups, or sliding_window {self.window} is < 1"
            )
        if self.rollback < 0:
            raise ValueError(f"rollback must be >= 0, got {self.rollback}")
        for rope in (self.rope, self.compress_rope):
            if rope.dim > min(self.head_dim, self.indexer.head_dim):
                raise ValueError(
                    f"{rope.dim} rotated channels exceed head_dim {self.head_dim} or"
                    f" index_head_dim {self.indexer.head_dim}"
                )

    def ratio(self, layer_type: str) -> int:
        return dict(self.ratios)[layer_type]

    def compressor(self, layer_type: str, head_dim: int | None = None) -> CompressorConfig:
        """Of a layer's entries; with the indexer's head_dim, of its index keys."""
        return CompressorConfig(
            ratio=self.ratio(layer_type),
            head_dim=head_dim or self.head_dim,
            overlap=layer_type == SPARSE,
            rope=self.compress_rope,
            norm_eps=self.norm_eps,
            rollback=self.rollback,
            paged=self.paged,
        )

    def compressors(self, layer_type: str) -> tuple[tuple[str, CompressorConfig], ...]:
        """What a layer compresses, by the name of the cache it goes to."""
        if layer_type == SLIDING:
            return ()
        if layer_type == HEAVY:
            return (("heavy", self.compressor(HEAVY)),)
        index = self.compressor(SPARSE, self.indexer.head_dim)
        return (("sparse", self.compressor(SPARSE)), ("index", index))

    def cache_names(self, layer_type: str) -> tuple[str, ...]:
        """The caches of one layer, in the order its attention takes them."""
        made = (c.cache_names(name) for name, c in self.compressors(layer_type))
        return ("window", *itertools.chain.from_iterable(made))

    def window_cache(self, layers: int, dtype: jnp.dtype, wide: jnp.dtype) -> CacheSpec:
        if self.paged:
            return PagedCache("window", layers, (self.head_dim,), jnp.dtype(dtype))
        ring = (self.window + self.rollback, self.head_dim)
        return StateCache("window", layers, ring, jnp.dtype(wide))

    def rope_of(self, layer_type: str) -> RopeConfig:
        return self.rope if layer_type == SLIDING else self.compress_rope


class EntryIndexer(nnx.Module):
    """Chooses entries by index keys, which have a compressor of their own over the same tokens."""

    def __init__(
        self,
        config: CompressedAttentionConfig,
        *,
        dtype: jnp.dtype,
        quant: str | None,
        axes: ParallelAxes,
    ) -> None:
        c, i = config, config.indexer
        self.config = i
        self.compressor = Compressor(
            c.hidden, c.compressor(SPARSE, i.head_dim), dtype=dtype, axes=axes
        )
        self.q = Linear(c.q_rank, i.num_heads * i.head_dim, dtype=dtype, quant=quant, axes=axes)
        self.score_weights = Linear(c.hidden, i.num_heads, dtype=dtype, axes=axes)

    def choose(
        self,
        x: Float[Array, "T hidden"],
        q_latent: Float[Array, "T q_rank"],
        rope: tuple[jax.Array, jax.Array],
        pool: Float[Array, "N E D"],
        step: StepRows,
        tables: jax.Array,
        visible: jax.Array,
    ) -> jax.Array:
        """i32 [T, k]: entries each row attends to, of its first `visible`."""
        c, batch = self.config, step.batch
        q = self.q(q_latent).reshape(x.shape[0], c.num_heads, c.head_dim)
        return index_topk(
            rotate_tail(q, *rope),
            self.score_weights(x).astype(jnp.float32) * c.scale,
            pool,
            tables,
            visible,
            batch.q_starts,
            k=c.top_k,
            q_per_seq=batch.q_per_seq if batch.is_decode else None,
        )


class CompressedAttention(nnx.Module):
    """x [T, hidden] -> [T, hidden], on every tp rank alike; one layer's caches in the
    order of `CompressedAttentionConfig.cache_names`."""

    def __init__(
        self,
        config: CompressedAttentionConfig,
        layer_type: str,
        *,
        dtype: jnp.dtype,
        quant: str | None,
        axes: ParallelAxes,
    ) -> None:
        c = config
        self.config, self.layer_type = c, layer_type
        kwargs = {"dtype": dtype, "quant": quant, "axes": axes}
        self.q_a = Linear(c.hidden, c.q_rank, **kwargs)
        self.q_norm = RMSNorm(c.q_rank, c.norm_eps, dtype)
        self.q_b = Linear(c.q_rank, c.num_heads * c.head_dim, **kwargs)
        self.kv = Linear(c.hidden, c.head_dim, **kwargs)
        self.kv_norm = RMSNorm(c.head_dim, c.norm_eps, dtype)
        self.sinks = param((c.num_heads,), jnp.float32, init="zeros")
        inner = c.num_heads * c.head_dim // c.out_groups
        # kept in the model's dtype: one product per group
        self.out_a = param((c.out_groups, c.out_rank, inner), dtype)
        self.out_b = Linear(c.out_groups * c.out_rank, c.hidden, **kwargs)
        self.compressor = (
            None
            if layer_type == SLIDING
            else Compressor(c.hidden, c.compressor(layer_type), dtype=dtype, axes=axes)
        )
        self.indexer = EntryIndexer(c, **kwargs) if layer_type == SPARSE else None

    def __call__(
        self,
        x: Float[Array, "T hidden"],
        rope: tuple[jax.Array, jax.Array],
        caches: tuple[jax.Array, ...],
        step: StepRows,
    ) -> tuple[Float[Array, "T hidden"], tuple[jax.Array, ...]]:
        """rope: cos and sin [T, rotated / 2] of the layer type's kind."""
        c = self.config
        q_latent = self.q_norm(self.q_a(x))
        q = self.q_b(q_latent).reshape(x.shape[0], c.num_heads, c.head_dim)
        q = rotate_tail(unit_rms(q, c.norm_eps), *rope)
        keys = rotate_tail(self.kv_norm(self.kv(x))[:, None], *rope)[:, 0]
        read = paged_window if c.paged else window_source
        window, kept = read(keys, caches[0], step, c.window)
        entries, others = self._entries(x, q_latent, rope, caches[1:], step)
        y = sparse_attention(q, (window, *entries), scale=c.head_dim**-0.5, sinks=self.sinks[...])
        cos, sin = rope
        return self._out(rotate_tail(y.astype(x.dtype), cos, -sin)), (kept, *others)

    def _entries(
        self,
        x: jax.Array,
        q_latent: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        caches: tuple[jax.Array, ...],
        step: StepRows,
    ) -> tuple[tuple[KeySource, ...], tuple[jax.Array, ...]]:
        """(what the rows attend to besides their window, the layer's other caches)."""
        if self.compressor is None:
            return (), ()
        ratio = self.config.ratio(self.layer_type)
        tables, visible = step.entry_tables(ratio), step.batch.visible // ratio
        own = len(self.compressor.config.cache_names("entries"))
        kept = self.compressor(x, caches[:own], step)
        if self.indexer is None:
            return (KeySource(kept[0], visible, None, tables, step.sequences),), kept
        index = self.indexer.compressor(x, caches[own:], step)
        chosen = self.indexer.choose(x, q_latent, rope, index[0], step, tables, visible)
        counts = jnp.minimum(visible, chosen.shape[1])
        return (KeySource(kept[0], counts, chosen, tables, step.sequences),), (*kept, *index)

    def _out(self, y: Float[Array, "T H D"]) -> Float[Array, "T hidden"]:
        """Each group of heads through its own projection, then all through one."""
        groups = y.reshape(y.shape[0], self.config.out_groups, -1)
        low = jnp.einsum("tgi,goi->tgo", groups, self.out_a[...])
        return self.out_b(low.reshape(y.shape[0], -1).astype(y.dtype))


def unit_rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in float32, in x's dtype."""
    xf = x.astype(jnp.float32)
    return (xf * jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + eps)).astype(x.dtype)
