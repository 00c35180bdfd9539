"""DeepSeek-V2 (and Lite), DeepSeek-V3 / R1, and the models that share their architecture (Kimi-K2,
Moonlight).

Latent attention, first dense and then mixture-of-experts layers; the two generations differ in the
router's terms only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.models.base import Caches, CacheSpec, KeyCost, ParallelAxes, StepBatch
from deepinfer_jax.models.hf_config import common_fields, require, require_silu
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.embedding import Embedding, LMHead
from deepinfer_jax.models.layers.mla import MLAConfig, MLAttention
from deepinfer_jax.models.layers.mlp import SwiGLU
from deepinfer_jax.models.layers.moe import MoE, moe_rules
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.rope import RopeConfig, rope_cos_sin
from deepinfer_jax.models.layers.router import RouterConfig
from deepinfer_jax.models.rules import Rule, WeightRules, linear_rules, swiglu_rules

LayerCaches = jax.Array | tuple[jax.Array, ...]
"""What one layer's attention reads and writes: its pool, or one pool per cache."""


@dataclass(frozen=True)
class DeepseekConfig:
    """config.json under our names. first_dense: layers before the first MoE layer; mtp_layers:
    draft layers in the checkpoint."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tie_word_embeddings: bool
    intermediate_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    first_dense: int
    moe_layer_freq: int
    mtp_layers: int
    mla: MLAConfig
    router: RouterConfig
    moe: MoeOptions = field(default_factory=MoeOptions)

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_dense and layer % self.moe_layer_freq == 0

    def key_costs(self, itemsize: int) -> tuple[KeyCost, ...]:
        """What attention pays per key, in the absorbed form. itemsize: of the caches."""
        latent = self.mla.entry_dim
        flops = self.num_heads * 2.0 * (latent + self.mla.kv_rank)
        return (KeyCost(self.num_layers * flops, self.num_layers * latent * itemsize),)

    def attention(self, **kwargs: Any) -> MLAttention:
        """The attention of one layer."""
        return MLAttention(self.hidden_size, self.mla, **kwargs)

    def attention_rules(self, target: str, source: str) -> list[Rule]:
        return mla_rules(self.mla, target, source)


def router_config(hf: dict[str, Any]) -> RouterConfig:
    """The router's terms. DeepSeek-V2 never normalises its weights, whatever norm_topk_prob says
    (as in transformers)."""
    experts, top_k = int(hf["n_routed_experts"]), int(hf["num_experts_per_tok"])
    v2 = hf.get("model_type") == "deepseek_v2"
    scoring = hf.get("scoring_func") or ("softmax" if v2 else "sigmoid")
    method = hf.get("topk_method") or ("greedy" if v2 else "noaux_tc")
    scale = float(hf.get("routed_scaling_factor") or 1.0)
    groups, kept = int(hf.get("n_group") or 1), int(hf.get("topk_group") or 1)
    match (scoring, method):
        case ("softmax", "greedy"):
            return RouterConfig(experts, top_k, scale=scale)
        case ("softmax", "group_limited_greedy"):
            return RouterConfig(experts, top_k, num_groups=groups, topk_groups=kept, scale=scale)
        case ("sigmoid", "noaux_tc"):
            normalize = bool(hf.get("norm_topk_prob", True))
            return RouterConfig(
                experts, top_k, "sigmoid", True, groups, kept, "top2", normalize, 1e-20, scale
            )
    raise ValueError(
        f"router scoring_func {scoring!r} with topk_method {method!r} is not supported; supported:"
        " softmax with greedy or group_limited_greedy, sigmoid with noaux_tc"
    )


def mla_config(hf: dict[str, Any]) -> MLAConfig:
    require(
        hf,
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_attention_heads",
    )
    return MLAConfig(
        num_heads=int(hf["num_attention_heads"]),
        q_rank=int(hf["q_lora_rank"]) if hf.get("q_lora_rank") else None,
        kv_rank=int(hf["kv_lora_rank"]),
        nope_dim=int(hf["qk_nope_head_dim"]),
        rope_dim=int(hf["qk_rope_head_dim"]),
        v_dim=int(hf["v_head_dim"]),
        rope=RopeConfig.from_hf(hf, int(hf["qk_rope_head_dim"])),
        interleaved=bool(hf.get("rope_interleave", True)),
        bias=bool(hf.get("attention_bias", False)),
    )


class DecoderLayer(nnx.Module):
    """x [T, hidden] -> (x, pool, load or None): attention and feed-forward, each behind a norm and
    added to the residual stream."""

    def __init__(
        self,
        config: DeepseekConfig,
        index: int,
        *,
        axes: ParallelAxes,
        dtype: jnp.dtype,
        quant: str | None,
    ) -> None:
        c = config
        kwargs = {"dtype": dtype, "quant": quant, "axes": axes}
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attn = c.attention(**kwargs)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.is_moe = c.is_moe(index)
        if self.is_moe:
            shared = c.num_shared_experts * c.moe_intermediate_size
            self.mlp = MoE(
                c.hidden_size,
                c.moe_intermediate_size,
                c.router,
                shared_intermediate=shared,
                options=c.moe,
                **kwargs,
            )
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, **kwargs)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, pool: LayerCaches, batch: StepBatch
    ) -> tuple[jax.Array, LayerCaches, jax.Array | None]:
        y, pool = self.attn(self.attn_norm(x), cos, sin, pool, batch)
        x = x + y
        if not self.is_moe:
            return x + self.mlp(self.mlp_norm(x)), pool, None
        y, load = self.mlp(self.mlp_norm(x), batch.valid)
        return x + y, pool, load


class Deepseek(nnx.Module):
    """See `models.base` for what a model is. Cache: "latent", one entry [1, kv_lora_rank +
    qk_rope_head_dim] per token and layer."""

    def __init__(
        self,
        config: DeepseekConfig,
        *,
        axes: ParallelAxes,
        dtype: jnp.dtype,
        quant: str | None = None,
    ) -> None:
        self.config = config
        self.embed = Embedding(
            config.vocab_size,
            config.hidden_size,
            dtype,
            quant=quant if config.tie_word_embeddings else None,
        )
        self.layers = nnx.List(
            [
                DecoderLayer(config, i, axes=axes, dtype=dtype, quant=quant)
                for i in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = (
            None
            if config.tie_word_embeddings
            else LMHead(config.hidden_size, config.vocab_size, dtype, quant=quant)
        )

    def __call__(self, caches: Caches, batch: StepBatch) -> tuple[jax.Array, Caches]:
        hidden, caches, _ = self.forward_with_load(caches, batch)
        return hidden, caches

    def forward_with_load(
        self, caches: Caches, batch: StepBatch
    ) -> tuple[jax.Array, Caches, jax.Array]:
        """As `__call__`, and i32 [MoE layers, num_experts]: how many of this rank's tokens chose
        each logical expert."""
        x = self.embed(batch.tokens)
        cos, sin = rope_cos_sin(self.config.mla.rope, batch.positions)
        pools, loads = [], []
        for layer, pool in zip(self.layers, self.layer_caches(caches), strict=True):
            x, pool, load = layer(x, cos, sin, pool, batch)
            pools.append(pool)
            loads += [] if load is None else [load]
        loads = (
            jnp.stack(loads) if loads else jnp.zeros((0, self.config.router.num_experts), jnp.int32)
        )
        return self.norm(x), caches | self.caches_of(pools), loads

    def layer_caches(self, caches: Caches) -> tuple[LayerCaches, ...]:
        """What each layer's attention takes of the caches."""
        return caches["latent"]

    def caches_of(self, layers: list[LayerCaches]) -> Caches:
        """The caches made of what the layers returned."""
        return {"latent": tuple(layers)}

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> float32 logits [R, V]."""
        return self.embed.attend(hidden) if self.head is None else self.head(hidden)

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DeepseekConfig:
        """From config.json in any spelling; ValueError naming a missing key or an
        unsupported term."""
        require_silu(hf)
        require(
            hf,
            "intermediate_size",
            "moe_intermediate_size",
            "n_routed_experts",
            "num_experts_per_tok",
        )
        mla = mla_config(hf)
        common = common_fields(hf) | {"head_dim": mla.nope_dim + mla.rope_dim}
        mtp = hf.get("num_nextn_predict_layers")
        return DeepseekConfig(
            **common,
            intermediate_size=int(hf["intermediate_size"]),
            moe_intermediate_size=int(hf["moe_intermediate_size"]),
            num_shared_experts=int(hf.get("n_shared_experts") or 0),
            first_dense=int(hf.get("first_k_dense_replace") or 0),
            moe_layer_freq=int(hf.get("moe_layer_freq") or 1),
            mtp_layers=int((hf.get("num_mtp_layers") if mtp is None else mtp) or 0),
            mla=mla,
            router=router_config(hf),
        )

    @classmethod
    def cache_specs(
        cls, config: DeepseekConfig, axes: ParallelAxes, dtype: jnp.dtype
    ) -> tuple[CacheSpec, ...]:
        return (config.mla.cache_spec(config.num_layers, dtype),)

    @classmethod
    def weight_rules(cls, config: DeepseekConfig, axes: ParallelAxes) -> WeightRules:
        """Layers past num_layers are multi-token-prediction drafts, which are recognised and left
        in the checkpoint."""
        rules = [
            Rule("embed.kernel", ("model.embed_tokens.weight",)),
            Rule("norm.weight", ("model.norm.weight",)),
        ]
        ignored = [
            rf"model\.layers\.{config.num_layers + i}\..*" for i in range(max(1, config.mtp_layers))
        ]
        if config.tie_word_embeddings:
            ignored.append(r"lm_head\.weight")
        else:
            rules.append(Rule("head.kernel", ("lm_head.weight",)))
        for i in range(config.num_layers):
            rules += layer_rules(config, i, axes)
        return WeightRules(tuple(rules), tuple(ignored))


class DeepseekV2(Deepseek):
    """Softmax routing, greedy over all experts or over the best groups."""


class DeepseekV3(Deepseek):
    """Sigmoid routing with a correction bias; also Kimi-K2 and Moonlight."""


def layer_rules(config: DeepseekConfig, index: int, axes: ParallelAxes) -> list[Rule]:
    target, source = f"layers.{index}", f"model.layers.{index}"
    rules = [
        Rule(f"{target}.attn_norm.weight", (f"{source}.input_layernorm.weight",)),
        Rule(f"{target}.mlp_norm.weight", (f"{source}.post_attention_layernorm.weight",)),
        *config.attention_rules(f"{target}.attn", f"{source}.self_attn"),
    ]
    if not config.is_moe(index):
        return rules + swiglu_rules(f"{target}.mlp", f"{source}.mlp")
    rules += moe_rules(f"{target}.mlp", f"{source}.mlp", config.router, axes, config.moe)
    return rules + (
        swiglu_rules(f"{target}.mlp.shared", f"{source}.mlp.shared_experts")
        if config.num_shared_experts
        else []
    )


def mla_rules(c: MLAConfig, target: str, source: str) -> list[Rule]:
    """kv_b_proj [H * (nope + v), rank] holds, head by head, the rows that make keys and then those
    that make values."""
    rows = c.nope_dim + c.v_dim

    def split(weight: np.ndarray, values: bool) -> np.ndarray:
        heads = weight.reshape(c.num_heads, rows, c.kv_rank)
        return heads[:, c.nope_dim :] if values else heads[:, : c.nope_dim]

    kv_b, shape = (f"{source}.kv_b_proj.weight",), ((c.num_heads * rows, c.kv_rank),)
    heads = (c.num_heads,)
    rules = [
        *linear_rules(f"{target}.kv_a", (f"{source}.kv_a_proj_with_mqa",), bias=c.bias),
        Rule(f"{target}.kv_norm.weight", (f"{source}.kv_a_layernorm.weight",)),
        Rule(f"{target}.w_uk", kv_b, transform=lambda w: split(w, False), source_shapes=shape),
        Rule(f"{target}.w_uv", kv_b, transform=lambda w: split(w, True), source_shapes=shape),
        *linear_rules(f"{target}.out", (f"{source}.o_proj",), bias=c.bias),
    ]
    if c.q_rank is None:
        return rules + linear_rules(f"{target}.q_b", (f"{source}.q_proj",), units=heads)
    return [
        *rules,
        *linear_rules(f"{target}.q_a", (f"{source}.q_a_proj",), bias=c.bias),
        Rule(f"{target}.q_norm.weight", (f"{source}.q_a_layernorm.weight",)),
        *linear_rules(f"{target}.q_b", (f"{source}.q_b_proj",), units=heads),
    ]
