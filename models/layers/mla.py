"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a cache of latents.

A token's cache entry is its normalised latent c (kv_lora_rank) and one rotated key shared by all
heads: nothing per head. With `w_uk` [H, nope, rank] and `w_uv` [H, v, rank] the halves of the
checkpoint's kv_b_proj, per head h:

    absorbed:  score = (w_uk[h]^T q_nope) . c + q_rope . k_rope,   out = w_uv[h] (sum_j p_j c_j)
    expanded:  k = [w_uk[h] c, k_rope], v = w_uv[h] c,             ordinary attention

They are equal. Absorbed reads the cache as it is, with 2 rank + rope multiplications per head,
query and key; expanded needs nope + rope + v. Going to and from latent space costs absorbed rank *
(nope + v) per head and query; expanded pays the same per key. So decode is absorbed, and prefill is
expanded when the step brings enough rows to pay for the keys (docs/decisions/030-mla-prefill.md).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.kernels_pallas import kv_write
from deepinfer_jax.models.base import PagedCache, ParallelAxes, StepBatch
from deepinfer_jax.models.layers.attention import paged_attention
from deepinfer_jax.models.layers.linear import WHOLE, Linear
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.param import param
from deepinfer_jax.models.layers.rope import RopeConfig, apply_rope

PREFILL_FORMS = ("auto", "absorbed", "expanded")


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of the attention layer. q_rank None: queries come straight from the hidden state.
    interleaved: how rotary pairs lie.

    prefill: "absorbed", "expanded", or "auto": by the batch's shape (`MLAConfig.expands`).
    expand_bytes: most memory for expanded keys and values; where they need more, heads are computed
    group after group.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: RopeConfig
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = 1e-6
    prefill: str = "auto"
    expand_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.prefill not in PREFILL_FORMS:
            raise ValueError(f"mla prefill must be one of {PREFILL_FORMS}, got {self.prefill!r}")
        if self.rope.dim != self.rope_dim:
            raise ValueError(
                f"rotary width {self.rope.dim} differs from qk_rope_head_dim {self.rope_dim}"
            )

    @property
    def entry_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def scale(self) -> float:
        """Softmax scale, with YaRN's mscale_all_dim squared."""
        return (self.nope_dim + self.rope_dim) ** -0.5 * self.rope.softmax_scale_factor

    def cache_spec(self, layers: int, dtype: jnp.dtype) -> PagedCache:
        """One latent per token and layer; every tp rank holds it whole."""
        return PagedCache("latent", layers, (1, self.entry_dim), jnp.dtype(dtype), tp_dim=None)

    def expands(self, tokens: int, sequences: int, keys: int) -> bool:
        """Whether a prefill step of `tokens` rows in `sequences` tables of `keys` keys each is
        computed in the expanded form."""
        if self.prefill != "auto":
            return self.prefill == "expanded"
        # per head: the expanded form saves this much per (row, key), and pays for every key what
        # the absorbed form pays for every row
        saved = 2 * self.kv_rank + self.rope_dim - (self.nope_dim + self.rope_dim + self.v_dim)
        return tokens * keys * saved > (sequences * keys - tokens) * self.kv_rank * (
            self.nope_dim + self.v_dim
        )

    def head_groups(self, heads: int, keys: int, itemsize: int) -> int:
        """Into how many groups `heads` heads are cut so that `keys` expanded keys of a group fit
        `expand_bytes` (one head always may)."""
        fitting = max(
            1, self.expand_bytes // (keys * (self.nope_dim + self.rope_dim + self.v_dim) * itemsize)
        )
        return next(g for g in range(1, heads + 1) if heads % g == 0 and heads // g <= fitting)


class MLAttention(nnx.Module):
    """x [T, hidden] -> [T, hidden]; heads are split over tp, the latent projection and the cache
    are replicated."""

    def __init__(
        self,
        hidden: int,
        config: MLAConfig,
        *,
        dtype: jnp.dtype,
        quant: str | None = None,
        axes: ParallelAxes = WHOLE,
    ) -> None:
        c = config
        if c.num_heads % axes.tp:
            raise ValueError(f"{c.num_heads} attention heads are not divisible by tp={axes.tp}")
        self.config, self.axes = c, axes
        kwargs = {"dtype": dtype, "quant": quant, "axes": axes}
        q_out = c.num_heads * (c.nope_dim + c.rope_dim)
        if c.q_rank is None:
            self.q_a = self.q_norm = None
            self.q_b = Linear(hidden, q_out, tp="column", **kwargs)
        else:
            self.q_a = Linear(hidden, c.q_rank, bias=c.bias, **kwargs)
            self.q_norm = RMSNorm(c.q_rank, c.norm_eps, dtype)
            self.q_b = Linear(c.q_rank, q_out, tp="column", **kwargs)
        self.kv_a = Linear(hidden, c.entry_dim, bias=c.bias, **kwargs)
        self.kv_norm = RMSNorm(c.kv_rank, c.norm_eps, dtype)
        # never quantised: they multiply activations per head, in both directions
        self.w_uk = param((c.num_heads, c.nope_dim, c.kv_rank), dtype, ("tp", None, None))
        self.w_uv = param((c.num_heads, c.v_dim, c.kv_rank), dtype, ("tp", None, None))
        self.out = Linear(c.num_heads * c.v_dim, hidden, bias=c.bias, tp="row", **kwargs)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, pool: jax.Array, batch: StepBatch
    ) -> tuple[jax.Array, jax.Array]:
        """cos, sin [T, rope_dim / 2]; pool [num_blocks, block_size, 1, kv_rank + rope_dim]. Returns
        (y, pool)."""
        q_nope, q_rope = self.queries(self.query_latent(x), cos, sin)
        pool = kv_write(pool, self.entries(x, cos, sin)[:, None, :], batch.write_slots)
        y = self.attend(q_nope, q_rope, pool, batch)
        return self.out(y.reshape(x.shape[0], -1).astype(x.dtype)), pool

    def attend(
        self, q_nope: jax.Array, q_rope: jax.Array, pool: jax.Array, batch: StepBatch
    ) -> jax.Array:
        """[T, H, v]: every row attends to all its keys."""
        attend = self._expanded if self._expands(batch, pool) else self._absorbed
        return attend(q_nope, q_rope, pool, batch)

    def _expands(self, batch: StepBatch, pool: jax.Array) -> bool:
        sequences, pages = batch.block_tables.shape
        return not batch.is_decode and self.config.expands(
            batch.tokens.shape[0], sequences, pages * pool.shape[1]
        )

    def query_latent(self, x: jax.Array) -> jax.Array:
        """What queries are made of, [T, q_rank]; without a q_rank the hidden state itself."""
        return x if self.q_a is None else self.q_norm(self.q_a(x))

    def queries(
        self, latent: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """[T, H, nope] and, rotated, [T, H, rope]; H is this rank's heads."""
        c = self.config
        q = self.q_b(latent).reshape(latent.shape[0], -1, c.nope_dim + c.rope_dim)
        return q[..., : c.nope_dim], apply_rope(q[..., c.nope_dim :], cos, sin, c.interleaved)

    def entries(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Cache entries [T, kv_rank + rope_dim]."""
        c = self.config
        latent, rope = jnp.split(self.kv_a(x), (c.kv_rank,), axis=-1)
        rope = apply_rope(rope[:, None, :], cos, sin, c.interleaved)[:, 0]
        return jnp.concatenate([self.kv_norm(latent), rope], axis=-1)

    def _absorbed(
        self, q_nope: jax.Array, q_rope: jax.Array, pool: jax.Array, batch: StepBatch
    ) -> jax.Array:
        """[T, H, v]: queries are brought into latent space, values come out of it."""
        c, q = self.config, self.absorb(q_nope, q_rope)
        out = paged_attention(q, pool, None, batch, scale=c.scale, v_dim=c.kv_rank)
        return self.values(out.astype(q.dtype))

    def absorb(self, q_nope: jax.Array, q_rope: jax.Array) -> jax.Array:
        """Queries in latent space: [T, H, kv_rank + rope]."""
        return jnp.concatenate(
            [jnp.einsum("thn,hnr->thr", q_nope, self.w_uk[...]), q_rope], axis=-1
        )

    def values(self, latents: jax.Array) -> jax.Array:
        """Weighted latents [T, H, kv_rank] -> values [T, H, v]."""
        return jnp.einsum("thr,hvr->thv", latents, self.w_uv[...])

    def _expanded(
        self, q_nope: jax.Array, q_rope: jax.Array, pool: jax.Array, batch: StepBatch
    ) -> jax.Array:
        """[T, H, v]: the pages of the batch's tables become ordinary keys and values, laid out
        sequence by sequence."""
        c = self.config
        sequences, pages = batch.block_tables.shape
        entries = pool[batch.block_tables.reshape(-1), :, 0].astype(
            q_nope.dtype
        )  # [S * P, block, rank + rope]
        latent, rope = entries[..., : c.kv_rank], entries[..., None, c.kv_rank :]
        tables = jnp.arange(sequences * pages, dtype=jnp.int32).reshape(sequences, pages)
        own = dataclasses.replace(batch, block_tables=tables)

        def some_heads(operands: tuple[jax.Array, ...]) -> jax.Array:
            q, w_uk, w_uv = operands
            k_nope = jnp.einsum("pbr,hnr->pbhn", latent, w_uk)
            keys = jnp.concatenate(
                [k_nope, jnp.broadcast_to(rope, (*k_nope.shape[:3], c.rope_dim))], axis=-1
            )
            return paged_attention(
                q, keys, jnp.einsum("pbr,hvr->pbhv", latent, w_uv), own, scale=c.scale
            )

        q, w_uk, w_uv = jnp.concatenate([q_nope, q_rope], axis=-1), self.w_uk[...], self.w_uv[...]
        (t, heads, _), positions = q.shape, sequences * pages * pool.shape[1]
        groups = c.head_groups(heads, positions, q.dtype.itemsize)
        if groups == 1:
            return some_heads((q, w_uk, w_uv))
        grouped = [w.reshape(groups, heads // groups, *w.shape[1:]) for w in (w_uk, w_uv)]
        out = jax.lax.map(
            some_heads, (q.reshape(t, groups, heads // groups, -1).swapaxes(0, 1), *grouped)
        )
        return out.swapaxes(0, 1).reshape(t, heads, c.v_dim)
