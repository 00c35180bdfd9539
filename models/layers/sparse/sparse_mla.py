"""Latent attention to the keys an indexer chose (DeepSeek-V3.2): the cost of a row grows with their
number, not with the context."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas import KeySource, kv_write, sparse_attention
from deepinfer_jax.models.base import ParallelAxes, StepBatch
from deepinfer_jax.models.layers.linear import WHOLE
from deepinfer_jax.models.layers.mla import MLAConfig, MLAttention
from deepinfer_jax.models.layers.sparse.indexer import Indexer, IndexerConfig


def run_if(
    condition: jax.Array,
    compute: Callable[..., jax.Array],
    operands: tuple[jax.Array, ...],
    otherwise: jax.Array,
) -> jax.Array:
    """compute(*operands) where `condition` (bool scalar) holds, else `otherwise`.

    A loop of one turn or none, since XLA copies the pools that a conditional's branches read.
    Operands are tied to the loop's value, or XLA would compute what no turn changes before it.
    """

    def turn(_: jax.Array, value: jax.Array) -> jax.Array:
        tied, _ = jax.lax.optimization_barrier((operands, value))
        return compute(*tied)

    return jax.lax.fori_loop(0, condition.astype(jnp.int32), turn, otherwise)


class SparseMLAttention(MLAttention):
    """x [T, hidden] -> [T, hidden]. Its caches: the latent pool, then the indexer's pools.

    While no sequence of the step has more keys than the indexer would choose, all rows attend to
    all keys, in the forms of `MLAttention`: that is the same set, without choosing.
    """

    def __init__(
        self,
        hidden: int,
        config: MLAConfig,
        indexer: IndexerConfig,
        *,
        dtype: jnp.dtype,
        quant: str | None = None,
        axes: ParallelAxes = WHOLE,
    ) -> None:
        super().__init__(hidden, config, dtype=dtype, quant=quant, axes=axes)
        if config.q_rank is None:
            raise ValueError("sparse attention needs q_lora_rank: the indexer reads that latent")
        self.indexer = Indexer(hidden, config.q_rank, indexer, dtype=dtype, quant=quant, axes=axes)

    def __call__(
        self,
        x: Float[Array, "T hidden"],
        cos: jax.Array,
        sin: jax.Array,
        pool: tuple[jax.Array, ...],
        batch: StepBatch,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """cos, sin [T, rope_dim / 2]; pool: the layer's caches, see the class. Returns (y,
        pool)."""
        latent_pool, *index_pools = pool
        q_latent = self.query_latent(x)
        q_nope, q_rope = self.queries(q_latent, cos, sin)
        latent_pool = kv_write(
            latent_pool, self.entries(x, cos, sin)[:, None, :], batch.write_slots
        )
        index_pools = self.indexer.write(x, cos, sin, tuple(index_pools), batch)

        def dense(q_nope: jax.Array, q_rope: jax.Array) -> jax.Array:
            return self.attend(q_nope, q_rope, latent_pool, batch).astype(x.dtype)

        def chosen(q_nope: jax.Array, q_rope: jax.Array, q_latent: jax.Array) -> jax.Array:
            entries = self.indexer.choose(x, q_latent, cos, sin, index_pools, batch)
            return self._chosen(q_nope, q_rope, latent_pool, batch, entries).astype(x.dtype)

        top_k = self.indexer.config.top_k
        if batch.block_tables.shape[1] * latent_pool.shape[1] <= top_k:
            y = dense(q_nope, q_rope)
        else:
            few = jnp.max(batch.kv_lens) <= top_k
            y = jnp.zeros((x.shape[0], q_nope.shape[1], self.config.v_dim), x.dtype)
            y = run_if(few, dense, (q_nope, q_rope), y)
            y = run_if(~few, chosen, (q_nope, q_rope, q_latent), y)
        return self.out(y.reshape(x.shape[0], -1)), (latent_pool, *index_pools)

    def _chosen(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        pool: jax.Array,
        batch: StepBatch,
        entries: jax.Array,
    ) -> Float[Array, "T H v"]:
        """Absorbed attention of each row to `entries` i32 [T, k] of its sequence."""
        c, q = self.config, self.absorb(q_nope, q_rope)
        source = KeySource(
            pool,
            jnp.minimum(batch.visible, entries.shape[1]),
            entries,
            batch.block_tables,
            batch.seq_ids,
        )
        out = sparse_attention(q, (source,), scale=c.scale, v_dim=c.kv_rank)
        return self.values(out.astype(q.dtype))
