"""Grouped-query attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.kernels_pallas import kv_write, paged_decode, ragged_prefill
from deepinfer_jax.models.base import PagedCache, ParallelAxes, StepBatch
from deepinfer_jax.models.layers.linear import WHOLE, Linear
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.rope import apply_rope


@dataclass(frozen=True)
class HeadLayout:
    """How query and key/value heads lie over tp: every rank holds `q_local` query heads and the
    `kv_local` heads they read.

    With fewer key/value heads than ranks each head is stored on tp / kv_heads ranks, so the global
    cache holds `kv_stored` = tp heads.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"{self.q_heads} query heads are not a multiple of {self.kv_heads} key/value heads"
            )
        if self.q_heads % self.tp or (self.kv_heads % self.tp and self.tp % self.kv_heads):
            raise ValueError(
                f"{self.q_heads} query and {self.kv_heads} key/value heads cannot be split over"
                f" tp={self.tp}"
            )

    @property
    def kv_stored(self) -> int:
        return max(self.kv_heads, self.tp)

    @property
    def q_local(self) -> int:
        return self.q_heads // self.tp

    @property
    def kv_local(self) -> int:
        return self.kv_stored // self.tp


def kv_cache_specs(
    layout: HeadLayout, layers: int, dtype: jnp.dtype
) -> tuple[PagedCache, PagedCache]:
    """The caches "k" and "v" of `layers` attention layers: entries [kv heads, head_dim], heads
    split over tp."""
    entry = (layout.kv_stored, layout.head_dim)
    return tuple(PagedCache(name, layers, entry, jnp.dtype(dtype), tp_dim=0) for name in ("k", "v"))


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    batch: StepBatch,
    *,
    scale: float,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """q [T, H, D] against each row's own pages (this step's rows already written) -> [T, H, Dv];
    decode or prefill by the batch."""
    kwargs = {"scale": scale, "v_dim": v_dim, "sliding_window": sliding_window, "sinks": sinks}
    if batch.is_decode:
        return paged_decode(
            q,
            k_pool,
            v_pool,
            batch.block_tables,
            batch.kv_lens,
            q_per_seq=batch.q_per_seq,
            **kwargs,
        )
    return ragged_prefill(
        q,
        k_pool,
        v_pool,
        batch.block_tables,
        batch.kv_lens,
        batch.q_starts,
        batch.seq_ids,
        **kwargs,
    )


class GQAttention(nnx.Module):
    """x [T, hidden] -> [T, hidden]; q, k and v are one kernel, laid out per tp rank as (q rows, k
    rows, v rows).

    qk_norm_eps: RMS-normalise each query and key head before the rotation (Qwen3).
    sliding_window: a row sees itself and the sliding_window - 1 rows before it; None: all.
    """

    def __init__(
        self,
        hidden: int,
        layout: HeadLayout,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
        dtype: jnp.dtype,
        quant: str | None = None,
        axes: ParallelAxes = WHOLE,
    ) -> None:
        self.layout, self.sliding_window = layout, sliding_window
        rows = (layout.q_heads + 2 * layout.kv_stored) * layout.head_dim
        self.qkv = Linear(
            hidden, rows, bias=qkv_bias, dtype=dtype, quant=quant, tp="column", axes=axes
        )
        self.out = Linear(
            layout.q_heads * layout.head_dim,
            hidden,
            bias=out_bias,
            dtype=dtype,
            quant=quant,
            tp="row",
            axes=axes,
        )
        self.q_norm = (
            RMSNorm(layout.head_dim, qk_norm_eps, dtype) if qk_norm_eps is not None else None
        )
        self.k_norm = (
            RMSNorm(layout.head_dim, qk_norm_eps, dtype) if qk_norm_eps is not None else None
        )

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        batch: StepBatch,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """cos, sin [T, rotated / 2]; pools [num_blocks, block_size, kv_local, head_dim]. Returns
        (y, k_pool, v_pool)."""
        q, k, v = self._project(x)
        k_pool = kv_write(k_pool, apply_rope(k, cos, sin), batch.write_slots)
        v_pool = kv_write(v_pool, v, batch.write_slots)
        scale = self.layout.head_dim**-0.5
        y = paged_attention(
            apply_rope(q, cos, sin),
            k_pool,
            v_pool,
            batch,
            scale=scale,
            sliding_window=self.sliding_window,
        )
        return self.out(y.reshape(x.shape[0], -1).astype(x.dtype)), k_pool, v_pool

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, q_local, D], k and v [T, kv_local, D]."""
        lay = self.layout
        heads = self.qkv(x).reshape(x.shape[0], -1, lay.head_dim)
        q, k, v = jnp.split(heads, (lay.q_local, lay.q_local + lay.kv_local), axis=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
