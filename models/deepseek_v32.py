"""DeepSeek-V3.2: V3 with a lightning indexer in every layer, which decides what the layer's latent
attention reads (DeepSeek sparse attention)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from deepinfer_jax.models.base import Caches, CacheSpec, KeyCost, ParallelAxes
from deepinfer_jax.models.deepseek import Deepseek, DeepseekConfig, LayerCaches
from deepinfer_jax.models.hf_config import require
from deepinfer_jax.models.layers.mla import MLAttention
from deepinfer_jax.models.layers.sparse.indexer import IndexerConfig, indexer_rules
from deepinfer_jax.models.layers.sparse.sparse_mla import SparseMLAttention
from deepinfer_jax.models.rules import Rule

LAYER_TYPE = "indexed_attention"
MLP_TYPES = ("dense", "sparse")


@dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(DeepseekConfig):
    """mlp_types: "dense" or "sparse" per layer; empty: as first_dense says."""

    indexer: IndexerConfig
    mlp_types: tuple[str, ...] = ()

    def is_moe(self, layer: int) -> bool:
        return self.mlp_types[layer] == "sparse" if self.mlp_types else super().is_moe(layer)

    def key_costs(self, itemsize: int) -> tuple[KeyCost, ...]:
        """All keys are scored, `top_k` of them attended to."""
        (latent,) = super().key_costs(itemsize)
        return (
            dataclasses.replace(latent, most=self.indexer.top_k),
            self.indexer.key_cost(self.num_layers, itemsize),
        )

    def index_overrides(self) -> dict[str, Any]:
        """Fields with which index keys are stored as FP8."""
        return {"indexer": dataclasses.replace(self.indexer, keys="fp8")}

    def attention(self, **kwargs: Any) -> MLAttention:
        return SparseMLAttention(self.hidden_size, self.mla, self.indexer, **kwargs)

    def attention_rules(self, target: str, source: str) -> list[Rule]:
        return super().attention_rules(target, source) + indexer_rules(
            f"{target}.indexer", f"{source}.indexer"
        )


class DeepseekV32(Deepseek):
    """See `models.base` for what a model is. Caches: "latent" as in V3, and "index": one index key
    per token and layer (with "index_scale" beside FP8 keys)."""

    def layer_caches(self, caches: Caches) -> tuple[LayerCaches, ...]:
        return tuple(zip(*(caches[name] for name in self._cache_names()), strict=True))

    def caches_of(self, layers: list[LayerCaches]) -> Caches:
        return dict(zip(self._cache_names(), zip(*layers, strict=True), strict=True))

    def _cache_names(self) -> tuple[str, ...]:
        return ("latent", *(s.name for s in self.config.indexer.cache_specs(1, jnp.float32)))

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DeepseekV32Config:
        """As `Deepseek.config_from_hf`; index sizes that config.json lacks are those of the
        published model."""
        require(hf, "q_lora_rank")
        layers = int(hf["num_hidden_layers"])
        if other := set(hf.get("layer_types") or ()) - {LAYER_TYPE}:
            raise ValueError(f"layer_types {sorted(other)} are not supported; all: {LAYER_TYPE!r}")
        mlp_types = tuple(hf.get("mlp_layer_types") or ())
        if mlp_types and (len(mlp_types) != layers or set(mlp_types) - set(MLP_TYPES)):
            raise ValueError(
                f"mlp_layer_types must be {layers} entries of {MLP_TYPES}, got {list(mlp_types)}"
            )
        base = super().config_from_hf(hf)
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        indexer = IndexerConfig(
            num_heads=int(hf.get("index_n_heads") or 64),
            head_dim=int(hf.get("index_head_dim") or 128),
            top_k=int(hf.get("index_topk") or 2048),
        )
        if indexer.head_dim < base.mla.rope_dim:
            raise ValueError(
                f"index_head_dim {indexer.head_dim} is less than qk_rope_head_dim"
                f" {base.mla.rope_dim}"
            )
        return DeepseekV32Config(**fields, indexer=indexer, mlp_types=mlp_types)

    @classmethod
    def cache_specs(
        cls, config: DeepseekV32Config, axes: ParallelAxes, dtype: jnp.dtype
    ) -> tuple[CacheSpec, ...]:
        latent = super().cache_specs(config, axes, dtype)
        return latent + config.indexer.cache_specs(config.num_layers, dtype)
