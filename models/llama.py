"""Llama-family dense decoders: Llama 2 and 3, Mistral, SmolLM2 and the layers that Qwen's dense
models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.kernels_pallas.decoder_layers import LayerWeights
from deepinfer_jax.models.base import Caches, CacheSpec, ParallelAxes, StepBatch
from deepinfer_jax.models.hf_config import common_fields, require, require_silu
from deepinfer_jax.models.layers.attention import GQAttention, HeadLayout, kv_cache_specs
from deepinfer_jax.models.layers.decoder import run_layers
from deepinfer_jax.models.layers.embedding import Embedding, LMHead
from deepinfer_jax.models.layers.linear import WHOLE
from deepinfer_jax.models.layers.mlp import SwiGLU
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.rope import RopeConfig, rope_cos_sin
from deepinfer_jax.models.rules import Rule, WeightRules, linear_rules, swiglu_rules


@dataclass(frozen=True)
class DenseConfig:
    """A dense decoder. windows: per layer, how many rows (itself included) a row sees;
    None: all."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def head_layout(self, axes: ParallelAxes) -> HeadLayout:
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim, axes.tp)


def dense_config(
    hf: dict[str, Any], windows: tuple[int | None, ...] | None = None, **fields: Any
) -> DenseConfig:
    """The fields all dense decoders spell alike; `fields` are the model's own. ValueError names
    what is unsupported."""
    require(hf, "intermediate_size")
    require_silu(hf)
    common = common_fields(hf)
    return DenseConfig(
        **common,
        intermediate_size=int(hf["intermediate_size"]),
        rope=RopeConfig.from_hf(hf),
        windows=windows or (None,) * common["num_layers"],
        **fields,
    )


def layer_windows(hf: dict[str, Any], default: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Each layer's window from `layer_types` where the configuration has it, else `default`.
    ValueError for other layer types."""
    types = hf.get("layer_types")
    if not types:
        return default
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layer types {unknown} are not supported; supported: 'full_attention',"
            " 'sliding_attention'"
        )
    if len(types) != len(default):
        raise ValueError(f"layer_types has {len(types)} entries for {len(default)} layers")
    if "sliding_attention" in types and not hf.get("sliding_window"):
        raise ValueError("layer_types has 'sliding_attention' but sliding_window is not set")
    return tuple(
        int(hf["sliding_window"]) if kind == "sliding_attention" else None for kind in types
    )


class DecoderLayer(nnx.Module):
    """x [T, hidden] -> [T, hidden]: attention and feed-forward, each normalised before and added
    after."""

    def __init__(
        self,
        config: DenseConfig,
        index: int,
        *,
        axes: ParallelAxes,
        dtype: jnp.dtype,
        quant: str | None,
    ) -> None:
        c, options = config, {"dtype": dtype, "quant": quant, "axes": axes}
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attn = GQAttention(
            c.hidden_size,
            c.head_layout(axes),
            qkv_bias=c.qkv_bias,
            out_bias=c.out_bias,
            qk_norm_eps=c.rms_norm_eps if c.qk_norm else None,
            sliding_window=c.windows[index],
            **options,
        )
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, **options)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        batch: StepBatch,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        attended, k_pool, v_pool = self.attn(self.attn_norm(x), cos, sin, k_pool, v_pool, batch)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), k_pool, v_pool

    def weights(self) -> LayerWeights:
        """The layer's parameters for the `decoder_layers` op."""
        attn, mlp = self.attn, self.mlp
        q_norm, k_norm = (norm and norm.weight[...] for norm in (attn.q_norm, attn.k_norm))
        return LayerWeights(
            attn_norm=self.attn_norm.weight[...],
            qkv=attn.qkv.weights(),
            q_norm=q_norm,
            k_norm=k_norm,
            out=attn.out.weights(),
            mlp_norm=self.mlp_norm.weight[...],
            gate_up=mlp.gate_up.weights(),
            down=mlp.down.weights(),
            window=attn.sliding_window,
            shards=attn.qkv.axes.tp,
        )


class Llama(nnx.Module):
    """LlamaForCausalLM; see models/base.py for what a step sees. quant: storage of all linear
    layers and the head."""

    def __init__(
        self,
        config: DenseConfig,
        *,
        axes: ParallelAxes = WHOLE,
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

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DenseConfig:
        """config.json in its old or new spelling; ValueError names what is missing or
        unsupported."""
        bias = bool(hf.get("attention_bias", False))
        return dense_config(
            {"rms_norm_eps": 1e-6, **hf},
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )

    @classmethod
    def cache_specs(
        cls, config: DenseConfig, axes: ParallelAxes, dtype: jnp.dtype
    ) -> tuple[CacheSpec, ...]:
        return kv_cache_specs(config.head_layout(axes), config.num_layers, dtype)

    @classmethod
    def weight_rules(cls, config: DenseConfig, axes: ParallelAxes) -> WeightRules:
        rules = [
            Rule("embed.kernel", ("model.embed_tokens.weight",)),
            Rule("norm.weight", ("model.norm.weight",)),
        ]
        for i in range(config.num_layers):
            rules += layer_rules(config, i)
        if config.tie_word_embeddings:
            return WeightRules(tuple(rules), ignored=(r"lm_head\.weight",))
        return WeightRules((*rules, Rule("head.kernel", ("lm_head.weight",))))

    def __call__(self, caches: Caches, batch: StepBatch) -> tuple[jax.Array, Caches]:
        """-> (hidden [T, hidden] after the last norm, caches with this step's rows written)."""
        rotation = rope_cos_sin(self.config.rope, batch.positions)
        x, scale = self.embed(batch.tokens), self.config.head_dim**-0.5
        return run_layers(self.layers, self.norm, x, rotation, caches, batch, scale=scale)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        return self.embed.attend(hidden) if self.head is None else self.head(hidden)


class Mistral(Llama):
    """MistralForCausalLM: Llama with one sliding window for all layers (or none)."""

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DenseConfig:
        window = hf.get("sliding_window")
        layers = int(hf.get("num_hidden_layers") or 0)
        return dense_config(
            hf, windows=layer_windows(hf, (int(window) if window else None,) * layers)
        )


def layer_rules(config: DenseConfig, i: int) -> list[Rule]:
    """Checkpoint names of decoder layer i, which Llama, Mistral, Qwen2 and Qwen3 share."""
    source, target = f"model.layers.{i}", f"layers.{i}"
    rules = [
        Rule(f"{target}.attn_norm.weight", (f"{source}.input_layernorm.weight",)),
        Rule(f"{target}.mlp_norm.weight", (f"{source}.post_attention_layernorm.weight",)),
    ]
    rules += attention_rules(f"{target}.attn", f"{source}.self_attn", config)
    return rules + swiglu_rules(f"{target}.mlp", f"{source}.mlp", bias=config.mlp_bias)


def attention_rules(target: str, source: str, config: Any) -> list[Rule]:
    """Rules of a `GQAttention`; config: num_heads, num_kv_heads, head_dim, qkv_bias, out_bias,
    qk_norm."""
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    rows = tuple(h * config.head_dim for h in heads)
    projections = tuple(f"{source}.{name}_proj" for name in "qkv")
    rules = linear_rules(f"{target}.qkv", projections, bias=config.qkv_bias, rows=rows, units=heads)
    rules += linear_rules(f"{target}.out", (f"{source}.o_proj",), bias=config.out_bias)
    if config.qk_norm:
        rules += [Rule(f"{target}.{n}_norm.weight", (f"{source}.{n}_norm.weight",)) for n in "qk"]
    return rules
