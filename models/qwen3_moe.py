"""Qwen3-MoE: Qwen3's attention with normalised query and key heads, and mixture-of-experts
feed-forward layers without shared experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.models.base import Caches, ParallelAxes, StepBatch
from deepinfer_jax.models.hf_config import require
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.embedding import Embedding, LMHead
from deepinfer_jax.models.layers.linear import WHOLE
from deepinfer_jax.models.layers.moe import MoE, moe_rules
from deepinfer_jax.models.layers.norm import RMSNorm
from deepinfer_jax.models.layers.rope import rope_cos_sin
from deepinfer_jax.models.layers.router import RouterConfig
from deepinfer_jax.models.llama import DecoderLayer, DenseConfig, Llama, dense_config
from deepinfer_jax.models.rules import WeightRules


@dataclass(frozen=True)
class Qwen3MoeConfig(DenseConfig):
    """moe_layers: per layer, whether its feed-forward part is a mixture of experts; the others are
    dense."""

    moe_layers: tuple[bool, ...] = ()
    moe_intermediate_size: int = 0
    router: RouterConfig = field(default_factory=lambda: RouterConfig(1, 1))
    moe: MoeOptions = field(default_factory=MoeOptions)


def moe_layers(hf: dict[str, Any]) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer, counted from 1, unless mlp_only_layers lists it."""
    step, dense = int(hf.get("decoder_sparse_step") or 1), set(hf.get("mlp_only_layers") or ())
    return tuple(
        i not in dense and (i + 1) % step == 0 for i in range(int(hf["num_hidden_layers"]))
    )


class Qwen3MoeLayer(DecoderLayer):
    """x [T, hidden] -> (x, k_pool, v_pool, load or None)."""

    def __init__(
        self,
        config: Qwen3MoeConfig,
        index: int,
        *,
        axes: ParallelAxes,
        dtype: jnp.dtype,
        quant: str | None,
    ) -> None:
        super().__init__(config, index, axes=axes, dtype=dtype, quant=quant)
        self.is_moe = config.moe_layers[index]
        if self.is_moe:
            self.mlp = MoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.router,
                dtype=dtype,
                quant=quant,
                axes=axes,
                options=config.moe,
            )

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        batch: StepBatch,
    ):
        y, k_pool, v_pool = self.attn(self.attn_norm(x), cos, sin, k_pool, v_pool, batch)
        x = x + y
        if not self.is_moe:
            return x + self.mlp(self.mlp_norm(x)), k_pool, v_pool, None
        y, load = self.mlp(self.mlp_norm(x), batch.valid)
        return x + y, k_pool, v_pool, load


class Qwen3Moe(Llama):
    """Qwen3MoeForCausalLM; caches "k" and "v" as in the dense models."""

    def __init__(
        self,
        config: Qwen3MoeConfig,
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
                Qwen3MoeLayer(config, i, axes=axes, dtype=dtype, quant=quant)
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
    def config_from_hf(cls, hf: dict[str, Any]) -> Qwen3MoeConfig:
        """config.json in its old or new spelling; ValueError names what is missing or
        unsupported."""
        hf = {"rms_norm_eps": 1e-6, "num_experts": hf.get("num_local_experts"), **hf}
        require(
            hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers"
        )
        window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
        bias = bool(hf.get("attention_bias", False))
        windows = (int(window) if window else None,) * int(hf["num_hidden_layers"])
        dense = dense_config(hf, windows, qkv_bias=bias, out_bias=bias, qk_norm=True)
        normalize = bool(hf.get("norm_topk_prob", False))
        return Qwen3MoeConfig(
            **{f.name: getattr(dense, f.name) for f in dataclasses.fields(dense)},
            moe_layers=moe_layers(hf),
            moe_intermediate_size=int(hf["moe_intermediate_size"]),
            router=RouterConfig(
                int(hf["num_experts"]), int(hf["num_experts_per_tok"]), normalize=normalize
            ),
        )

    def __call__(self, caches: Caches, batch: StepBatch) -> tuple[jax.Array, Caches]:
        hidden, caches, _ = self.forward_with_load(caches, batch)
        return hidden, caches

    def forward_with_load(
        self, caches: Caches, batch: StepBatch
    ) -> tuple[jax.Array, Caches, jax.Array]:
        """As `__call__`, and i32 [MoE layers, num_experts]: how many of this rank's tokens chose
        each logical expert."""
        cos, sin = rope_cos_sin(self.config.rope, batch.positions)
        x, loads = self.embed(batch.tokens), []
        keys, values = list(caches["k"]), list(caches["v"])
        for i, layer in enumerate(self.layers):
            x, keys[i], values[i], load = layer(x, cos, sin, keys[i], values[i], batch)
            loads += [] if load is None else [load]
        loads = (
            jnp.stack(loads) if loads else jnp.zeros((0, self.config.router.num_experts), jnp.int32)
        )
        return self.norm(x), {**caches, "k": tuple(keys), "v": tuple(values)}, loads

    @classmethod
    def weight_rules(cls, config: Qwen3MoeConfig, axes: ParallelAxes) -> WeightRules:
        common = super().weight_rules(config, axes)
        rules = [r for r in common.rules if not _is_expert_mlp(r.target, config)]
        for i in (i for i, moe in enumerate(config.moe_layers) if moe):
            rules += moe_rules(
                f"layers.{i}.mlp", f"model.layers.{i}.mlp", config.router, axes, config.moe
            )
        return WeightRules(tuple(rules), common.ignored)


def _is_expert_mlp(target: str, config: Qwen3MoeConfig) -> bool:
    """Whether a dense model's rule fills a feed-forward layer that is a mixture of experts here."""
    parts = target.split(".")
    return parts[0] == "layers" and parts[2] == "mlp" and config.moe_layers[int(parts[1])]
