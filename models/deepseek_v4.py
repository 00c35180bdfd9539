"""DeepSeek-V4: attention to a sliding window and to compressed entries, hyper-connections, and
mixture-of-experts in every layer, the first ones routed by a table of tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deepinfer_jax.models.base import Caches, CacheSpec, ParallelAxes, StepBatch
from deepinfer_jax.models.deepseek_v4_config import DeepseekV4Config, config_from_hf
from deepinfer_jax.models.layers.embedding import Embedding, LMHead
from deepinfer_jax.models.layers.hyper_connections import HyperConnection, HyperHead
from deepinfer_jax.models.layers.moe import MoE, TokenExperts, moe_rules
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.rope import rope_cos_sin
from deepinfer_jax.models.layers.sparse.compressed_attention import (
    HEAVY,
    SLIDING,
    SPARSE,
    CompressedAttention,
)
from deepinfer_jax.models.layers.sparse.rings import StepRows
from deepinfer_jax.models.rules import Rename, Rule, WeightRules, linear_rules, swiglu_rules

EXPERT_NAMES = ("w1", "w3", "w2")
"""Gate, up and down projections as V4's checkpoints call them."""

RENAMES = (
    Rename(r"model\.(.*)", r"\1"),
    Rename(r"embed_tokens\.(.*)", r"embed.\1"),
    Rename(r"lm_head\.(.*)", r"head.\1"),
    Rename(r"hc_head\.hc_(\w+)", r"hc_head_\1"),
    Rename(r"(layers\.\d+\.attn)\.norm\.(.*)", r"\1.kv_norm.\2"),
)
"""Names that transformers writes -> names of the published checkpoints, which the rules use."""


class DecoderLayer(nnx.Module):
    """streams [T, M, hidden] -> (streams, the layer's caches, expert load)."""

    def __init__(
        self,
        config: DeepseekV4Config,
        index: int,
        *,
        axes: ParallelAxes,
        dtype: jnp.dtype,
        quant: str | None,
    ) -> None:
        c = config
        kwargs = {"dtype": dtype, "quant": quant, "axes": axes}
        self.layer_type = c.layer_types[index]
        self.attn_streams = HyperConnection(c.hidden_size, c.hyper)
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attn = CompressedAttention(c.attention, self.layer_type, **kwargs)
        self.mlp_streams = HyperConnection(c.hidden_size, c.hyper)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = MoE(
            c.hidden_size,
            c.moe_intermediate_size,
            c.router_of(index),
            shared_intermediate=c.num_shared_experts * c.moe_intermediate_size,
            swiglu_limit=c.swiglu_limit,
            options=c.moe,
            **kwargs,
        )
        self.token_routes = (
            TokenExperts(c.vocab_size, c.router) if c.mlp_types[index] == "hash_moe" else None
        )

    def __call__(
        self,
        streams: Float[Array, "T M D"],
        rope: tuple[jax.Array, jax.Array],
        caches: tuple[jax.Array, ...],
        step: StepRows,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        batch = step.batch
        x, post, comb = self.attn_streams.read(streams)
        y, caches = self.attn(self.attn_norm(x), rope, caches, step)
        streams = self.attn_streams.write(streams, y, post, comb)
        x, post, comb = self.mlp_streams.read(streams)
        experts = None if self.token_routes is None else self.token_routes(batch.tokens)
        y, load = self.mlp(self.mlp_norm(x), batch.valid, experts)
        return self.mlp_streams.write(streams, y, post, comb), caches, load


class DeepseekV4(nnx.Module):
    """See `models.base` for what a model is.

    Caches: "window", a ring of keys per sequence and layer. For each compressed layer the entries
    ("sparse" or "heavy") in pages, and a ring of the rows that unfinished entries are made of
    ("sparse_rows", "heavy_rows"); "index" and "index_rows" are the same for index keys.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        axes: ParallelAxes,
        dtype: jnp.dtype,
        quant: str | None = None,
    ) -> None:
        c = config
        self.config = c
        self.embed = Embedding(c.vocab_size, c.hidden_size, dtype)
        self.layers = nnx.List(
            [DecoderLayer(c, i, axes=axes, dtype=dtype, quant=quant) for i in range(c.num_layers)]
        )
        self.merge = HyperHead(c.hidden_size, c.hyper)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.head = (
            None
            if c.tie_word_embeddings
            else LMHead(c.hidden_size, c.vocab_size, dtype, quant=quant)
        )

    def __call__(self, caches: Caches, batch: StepBatch) -> tuple[jax.Array, Caches]:
        hidden, caches, _ = self.forward_with_load(caches, batch)
        return hidden, caches

    def forward_with_load(
        self, caches: Caches, batch: StepBatch
    ) -> tuple[jax.Array, Caches, jax.Array]:
        """As `__call__`, and i32 [layers, num_experts]: how many of this rank's tokens chose each
        logical expert."""
        c, step = self.config, StepRows(batch)
        ropes = {
            kind: rope_cos_sin(c.attention.rope_of(kind), batch.positions)
            for kind in dict.fromkeys(c.layer_types)
        }
        x = self.embed(batch.tokens)
        streams = jnp.broadcast_to(x[:, None], (x.shape[0], c.hyper.streams, x.shape[1]))
        left = {name: iter(pools) for name, pools in caches.items()}
        made: dict[str, list[jax.Array]] = {name: [] for name in caches}
        loads = []
        for layer in self.layers:
            names = c.attention.cache_names(layer.layer_type)
            mine = tuple(next(left[name]) for name in names)
            streams, mine, load = layer(streams, ropes[layer.layer_type], mine, step)
            for name, pool in zip(names, mine, strict=True):
                made[name].append(pool)
            loads.append(load)
        hidden = self.norm(self.merge(streams))
        return hidden, {n: tuple(pools) for n, pools in made.items()}, jnp.stack(loads)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 logits [R, V]."""
        return self.embed.attend(hidden) if self.head is None else self.head(hidden)

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DeepseekV4Config:
        return config_from_hf(hf)

    @classmethod
    def cache_specs(
        cls, config: DeepseekV4Config, axes: ParallelAxes, dtype: jnp.dtype
    ) -> tuple[CacheSpec, ...]:
        """Entries in the cache's dtype; rings in it too, but never in less than 16 bits."""
        c = config.attention
        wide = jnp.dtype(dtype) if jnp.dtype(dtype).itemsize > 1 else jnp.dtype(jnp.bfloat16)
        specs = [c.window_cache(config.num_layers, dtype, wide)]
        for kind in (HEAVY, SPARSE):
            if count := len(config.layers_of(kind)):
                for name, sizes in c.compressors(kind):
                    specs += sizes.caches(name, count, dtype, wide)
        return tuple(specs)

    @classmethod
    def weight_rules(cls, config: DeepseekV4Config, axes: ParallelAxes) -> WeightRules:
        """Draft layers (multi-token prediction) are recognised and left in the checkpoint."""
        rules = [
            Rule("embed.kernel", ("embed.weight",)),
            Rule("norm.weight", ("norm.weight",)),
            *(Rule(f"merge.{part}", (f"hc_head_{part}",)) for part in ("fn", "base", "scale")),
        ]
        ignored = [r"mtp\..*"]
        if config.tie_word_embeddings:
            ignored.append(r"head\.weight")
        else:
            rules.append(Rule("head.kernel", ("head.weight",)))
        for i in range(config.num_layers):
            rules += layer_rules(config, i, axes)
        return WeightRules(tuple(rules), tuple(ignored), RENAMES)


def layer_rules(config: DeepseekV4Config, index: int, axes: ParallelAxes) -> list[Rule]:
    target = source = f"layers.{index}"
    rules = [
        Rule(f"{target}.attn_norm.weight", (f"{source}.attn_norm.weight",)),
        Rule(f"{target}.mlp_norm.weight", (f"{source}.ffn_norm.weight",)),
        *attention_rules(config, index, f"{target}.attn", f"{source}.attn"),
        *moe_rules(
            f"{target}.mlp",
            f"{source}.ffn",
            config.router_of(index),
            axes,
            config.moe,
            projections=EXPERT_NAMES,
            bias="gate.bias",
        ),
    ]
    for ours, theirs in (("attn_streams", "hc_attn"), ("mlp_streams", "hc_ffn")):
        rules += [
            Rule(f"{target}.{ours}.{part}", (f"{source}.{theirs}_{part}",))
            for part in ("fn", "base", "scale")
        ]
    if config.num_shared_experts:
        rules += swiglu_rules(
            f"{target}.mlp.shared", f"{source}.ffn.shared_experts", projections=EXPERT_NAMES
        )
    if config.mlp_types[index] == "hash_moe":
        rules.append(Rule(f"{target}.token_routes.table", (f"{source}.ffn.gate.tid2eid",)))
    return rules


def attention_rules(config: DeepseekV4Config, index: int, target: str, source: str) -> list[Rule]:
    c = config.attention
    layer_type = config.layer_types[index]
    shape = (c.out_groups * c.out_rank, c.num_heads * c.head_dim // c.out_groups)
    rules = [
        *linear_rules(f"{target}.q_a", (f"{source}.wq_a",)),
        Rule(f"{target}.q_norm.weight", (f"{source}.q_norm.weight",)),
        *linear_rules(f"{target}.q_b", (f"{source}.wq_b",)),
        *linear_rules(f"{target}.kv", (f"{source}.wkv",)),
        Rule(f"{target}.kv_norm.weight", (f"{source}.kv_norm.weight",)),
        Rule(f"{target}.sinks", (f"{source}.attn_sink",)),
        Rule(
            f"{target}.out_a",
            (f"{source}.wo_a.weight",),
            transform=lambda w: w.reshape(c.out_groups, c.out_rank, -1),
            source_shapes=(shape,),
        ),
        *linear_rules(f"{target}.out_b", (f"{source}.wo_b",)),
    ]
    if layer_type != SLIDING:
        rules += compressor_rules(f"{target}.compressor", f"{source}.compressor")
    if layer_type == SPARSE:
        indexer = f"{source}.indexer"
        rules += compressor_rules(f"{target}.indexer.compressor", f"{indexer}.compressor")
        rules += linear_rules(f"{target}.indexer.q", (f"{indexer}.wq_b",))
        rules += linear_rules(f"{target}.indexer.score_weights", (f"{indexer}.weights_proj",))
    return rules


def compressor_rules(target: str, source: str) -> list[Rule]:
    return [
        *linear_rules(f"{target}.kv_gate", (f"{source}.wkv", f"{source}.wgate")),
        Rule(f"{target}.position_bias", (f"{source}.ape",)),
        Rule(f"{target}.norm.weight", (f"{source}.norm.weight",)),
    ]
