"""The lightning indexer of DeepSeek-V3.2 (technical report, section 2.1): few narrow heads decide
which keys a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deepinfer_jax.kernels_pallas import index_topk, kv_write
from deepinfer_jax.models.base import CacheSpec, KeyCost, PagedCache, ParallelAxes, StepBatch
from deepinfer_jax.models.layers.linear import Linear
from deepinfer_jax.models.layers.norm import LayerNorm
from deepinfer_jax.models.layers.rope import apply_rope
from deepinfer_jax.models.rules import Rule, linear_rules

INDEX_KEYS = ("model", "fp8")
FP8_MAX = 448.0


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of the indexer. top_k: keys a query attends to. norm_eps: of the keys' layer norm.

    keys: "model" keeps index keys in the cache's dtype; "fp8" as e4m3 with one float32 factor per
    key, a power of two.
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm_eps: float = 1e-6
    keys: str = "model"

    def __post_init__(self) -> None:
        if self.keys not in INDEX_KEYS:
            raise ValueError(f"index keys must be one of {INDEX_KEYS}, got {self.keys!r}")
        if min(self.num_heads, self.head_dim, self.top_k) < 1:
            raise ValueError(
                f"index_n_heads, index_head_dim and index_topk must be >= 1, got {self.num_heads},"
                f" {self.head_dim} and {self.top_k}"
            )

    @property
    def scale(self) -> float:
        """Factor on the heads' weights."""
        return (self.num_heads * self.head_dim) ** -0.5

    def key_cost(self, layers: int, itemsize: int, stride: int = 1) -> KeyCost:
        """Of scoring the keys of `layers` layers, of which there is one per `stride` tokens."""
        flops = layers * self.num_heads * 2.0 * self.head_dim
        size = layers * self.head_dim * (itemsize if self.keys == "model" else 1)
        return KeyCost(flops, size, stride, beyond=self.top_k)

    def cache_specs(self, layers: int, dtype: jnp.dtype) -> tuple[CacheSpec, ...]:
        """The caches of index keys, one key per token."""
        if self.keys == "model":
            return (PagedCache("index", layers, (self.head_dim,), jnp.dtype(dtype)),)
        return (
            PagedCache("index", layers, (self.head_dim,), jnp.dtype(jnp.float8_e4m3fn)),
            PagedCache("index_scale", layers, (), jnp.dtype(jnp.float32)),
        )


def quantize_keys(keys: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """e4m3 keys and their factors: the least power of two that keeps each key within +-448."""
    largest = jnp.maximum(jnp.max(jnp.abs(keys.astype(jnp.float32)), axis=-1), 1e-4)
    exponent = jnp.ceil(jnp.log2(largest / FP8_MAX)).astype(jnp.int32)
    factor = jnp.ldexp(jnp.float32(1), exponent)  # exp2 may be off by a bit
    return (keys.astype(jnp.float32) / factor[:, None]).astype(jnp.float8_e4m3fn), factor


class Indexer(nnx.Module):
    """Chooses, per row, the keys to attend to; its heads are not split over tp."""

    def __init__(
        self,
        hidden: int,
        q_rank: int,
        config: IndexerConfig,
        *,
        dtype: jnp.dtype,
        quant: str | None,
        axes: ParallelAxes,
    ) -> None:
        c = config
        self.config = c
        self.q = Linear(q_rank, c.num_heads * c.head_dim, dtype=dtype, quant=quant, axes=axes)
        # small and decisive: a rounded key or weight can change the choice, so neither is quantised
        self.k = Linear(hidden, c.head_dim, dtype=dtype, axes=axes)
        self.k_norm = LayerNorm(c.head_dim, c.norm_eps, dtype)
        self.score_weights = Linear(hidden, c.num_heads, dtype=dtype, axes=axes)

    def write(
        self,
        x: Float[Array, "T hidden"],
        cos: jax.Array,
        sin: jax.Array,
        pools: tuple[jax.Array, ...],
        batch: StepBatch,
    ) -> tuple[jax.Array, ...]:
        """The index pools with this step's keys. Index heads rotate their first channels, in
        halves, whatever the attention's own pairs are."""
        keys = apply_rope(self.k_norm(self.k(x))[:, None, :], cos, sin)[:, 0]
        parts = (keys,) if self.config.keys == "model" else quantize_keys(keys)
        return tuple(
            kv_write(pool, part, batch.write_slots) for pool, part in zip(pools, parts, strict=True)
        )

    def choose(
        self,
        x: Float[Array, "T hidden"],
        q_latent: Float[Array, "T q_rank"],
        cos: jax.Array,
        sin: jax.Array,
        pools: tuple[jax.Array, ...],
        batch: StepBatch,
    ) -> Int[Array, "T k"]:
        """Positions each row attends to, -1 past its own; `pools` already hold this step's keys."""
        c = self.config
        q = self.q(q_latent).reshape(x.shape[0], c.num_heads, c.head_dim)
        weights = self.score_weights(x).astype(jnp.float32) * c.scale
        return index_topk(
            apply_rope(q, cos, sin),
            weights,
            pools[0],
            batch.block_tables,
            batch.visible,
            batch.q_starts,
            k=c.top_k,
            q_per_seq=batch.q_per_seq if batch.is_decode else None,
            key_scales=pools[1] if len(pools) > 1 else None,
        )


def indexer_rules(target: str, source: str) -> list[Rule]:
    """Rules of an `Indexer` at `target` from the checkpoint's `source`.{wq_b, wk, k_norm,
    weights_proj}."""
    return [
        *linear_rules(f"{target}.q", (f"{source}.wq_b",)),
        *linear_rules(f"{target}.k", (f"{source}.wk",)),
        Rule(f"{target}.k_norm.weight", (f"{source}.k_norm.weight",)),
        Rule(f"{target}.k_norm.bias", (f"{source}.k_norm.bias",)),
        *linear_rules(f"{target}.score_weights", (f"{source}.weights_proj",)),
    ]
