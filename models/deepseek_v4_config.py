"""config.json of DeepSeek-V4 under our names, in the spelling of the published checkpoints
(compress_ratios, num_hash_layers, qk_rope_head_dim, rope_scaling) and in that of transformers
(layer_types, compress_rates, mlp_layer_types, nested rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_jax.models.base import KeyCost
from deepinfer_jax.models.hf_config import common_fields, require, require_silu
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.hyper_connections import HyperConfig
from deepinfer_jax.models.layers.rope import RopeConfig
from deepinfer_jax.models.layers.router import SCORING, RouterConfig
from deepinfer_jax.models.layers.sparse.compressed_attention import (
    HEAVY,
    LAYER_TYPES,
    SLIDING,
    SPARSE,
    CompressedAttentionConfig,
)
from deepinfer_jax.models.layers.sparse.indexer import IndexerConfig

MLP_TYPES = ("hash_moe", "moe")
RATIOS = {SPARSE: 4, HEAVY: 128}
"""Tokens per entry where config.json does not say."""
HASH_LAYERS = 3


@dataclass(frozen=True)
class DeepseekV4Config:
    """layer_types, mlp_types: one per layer. mtp_layers: draft layers in the checkpoint."""

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
    moe_intermediate_size: int
    num_shared_experts: int
    swiglu_limit: float
    layer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    mtp_layers: int
    attention: CompressedAttentionConfig
    hyper: HyperConfig
    router: RouterConfig
    moe: MoeOptions = field(default_factory=MoeOptions)

    def reuse_overrides(self) -> dict[str, Any]:
        """Fields with which blocks hold all that a sequence needs to start at their end: what
        sharing prompt beginnings asks for."""
        return {"attention": replace(self.attention, paged=True)}

    def key_costs(self, itemsize: int) -> tuple[KeyCost, ...]:
        """What attention pays per key of the window, per entry of either kind and per index
        key."""
        c = self.attention
        flops, size = c.num_heads * 4.0 * c.head_dim, c.head_dim * itemsize
        sparse, heavy = len(self.layers_of(SPARSE)), len(self.layers_of(HEAVY))
        ratio = c.ratio(SPARSE)
        return (
            KeyCost(self.num_layers * flops, self.num_layers * size, most=c.window),
            KeyCost(sparse * flops, sparse * size, ratio, most=c.indexer.top_k),
            KeyCost(heavy * flops, heavy * size, c.ratio(HEAVY)),
            c.indexer.key_cost(sparse, itemsize, ratio),
        )

    def layers_of(self, *layer_types: str) -> tuple[int, ...]:
        """The layers of these types, in order."""
        return tuple(i for i, t in enumerate(self.layer_types) if t in layer_types)

    def router_of(self, layer: int) -> RouterConfig:
        """The layer's router; one that looks experts up has no correction bias."""
        return RouterConfig(
            num_experts=self.router.num_experts,
            top_k=self.router.top_k,
            scoring=self.router.scoring,
            bias=self.mlp_types[layer] == "moe",
            normalize=True,
            normalize_eps=1e-20,
            scale=self.router.scale,
        )


def config_from_hf(hf: dict[str, Any]) -> DeepseekV4Config:
    """ValueError naming a missing key or an unsupported value."""
    require_silu(hf)
    require(hf, "head_dim", "q_lora_rank", "moe_intermediate_size", "n_routed_experts")
    require(hf, "num_experts_per_tok", "o_groups", "o_lora_rank", "sliding_window")
    if int(hf.get("num_key_value_heads") or 1) != 1:
        raise ValueError(f"num_key_value_heads {hf['num_key_value_heads']} is not supported: one")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise ValueError(f"{key} is not supported by DeepSeek-V4 models")
    common = common_fields(hf | {"num_key_value_heads": 1})
    layers, ratios = common["num_layers"], compress_ratios(hf)
    scoring = hf.get("scoring_func") or "sqrtsoftplus"
    if scoring not in SCORING:
        raise ValueError(f"scoring_func {scoring!r} is not supported; supported: {SCORING}")
    limit = hf.get("swiglu_limit")
    return DeepseekV4Config(
        **common,
        moe_intermediate_size=int(hf["moe_intermediate_size"]),
        num_shared_experts=int(hf.get("n_shared_experts") or 0),
        swiglu_limit=10.0 if limit is None else float(limit),
        layer_types=layer_types(hf, layers, ratios),
        mlp_types=mlp_types(hf, layers),
        mtp_layers=int(hf.get("num_nextn_predict_layers") or 0),
        attention=attention_config(hf, common, ratios),
        hyper=HyperConfig(
            streams=int(hf.get("hc_mult") or 4),
            iterations=int(hf.get("hc_sinkhorn_iters") or 20),
            eps=float(hf.get("hc_eps") or 1e-6),
            norm_eps=common["rms_norm_eps"],
        ),
        router=RouterConfig(
            num_experts=int(hf["n_routed_experts"]),
            top_k=int(hf["num_experts_per_tok"]),
            scoring=scoring,
            scale=1.5 if (s := hf.get("routed_scaling_factor")) is None else float(s),
        ),
    )


def attention_config(
    hf: dict[str, Any], common: dict[str, Any], ratios: dict[str, int]
) -> CompressedAttentionConfig:
    head_dim, eps = common["head_dim"], common["rms_norm_eps"]
    rope, compress_rope = ropes(hf, head_dim)
    return CompressedAttentionConfig(
        hidden=common["hidden_size"],
        num_heads=common["num_heads"],
        head_dim=head_dim,
        q_rank=int(hf["q_lora_rank"]),
        out_groups=int(hf["o_groups"]),
        out_rank=int(hf["o_lora_rank"]),
        window=int(hf["sliding_window"]),
        ratios=tuple(ratios.items()),
        rope=rope,
        compress_rope=compress_rope,
        indexer=IndexerConfig(
            num_heads=int(hf.get("index_n_heads") or 64),
            head_dim=int(hf.get("index_head_dim") or 128),
            top_k=int(hf.get("index_topk") or 512),
            norm_eps=eps,
        ),
        norm_eps=eps,
    )


def compress_ratios(hf: dict[str, Any]) -> dict[str, int]:
    """Tokens per entry of each compressed layer type."""
    ratios = dict(RATIOS)
    given = dict(hf.get("compress_rates") or {})
    if unknown := given.keys() - ratios.keys():
        raise ValueError(f"compress_rates {sorted(unknown)} are not known; known: {[*RATIOS]}")
    ratios |= {k: int(v) for k, v in given.items()}
    for key, layer_type in (("compress_rate_csa", SPARSE), ("compress_rate_hca", HEAVY)):
        if hf.get(key) is not None:
            ratios[layer_type] = int(hf[key])
    if bad := {k: v for k, v in ratios.items() if v < 1}:
        raise ValueError(f"compress_rates must be >= 1, got {bad}")
    return ratios


def layer_types(hf: dict[str, Any], layers: int, ratios: dict[str, int]) -> tuple[str, ...]:
    """From `layer_types`, else from `compress_ratios` (0 for a plain window), else the published
    schedule: two heavily compressed layers, then both kinds in turn."""
    given = hf.get("layer_types")
    if given is None and hf.get("compress_ratios") is not None:
        kinds = {0: SLIDING} | {ratio: kind for kind, ratio in ratios.items()}
        if unknown := set(hf["compress_ratios"]) - kinds.keys():
            raise ValueError(
                f"compress_ratios {sorted(unknown)} are not known; known: {sorted(kinds)}"
            )
        given = [kinds[ratio] for ratio in hf["compress_ratios"]]
    if given is None:
        turns = (HEAVY, SPARSE)
        given = [HEAVY] * min(2, layers) + [turns[i % 2] for i in range(layers - 2)]
    if len(given) < layers or set(given) - set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must name {layers} layers, each one of {LAYER_TYPES}, got {list(given)}"
        )
    return tuple(given[:layers])  # the rest, if any, are draft layers


def mlp_types(hf: dict[str, Any], layers: int) -> tuple[str, ...]:
    """From `mlp_layer_types`, else `num_hash_layers` layers that look experts up come first."""
    given = hf.get("mlp_layer_types")
    if given is None:
        count = hf.get("num_hash_layers")
        hashed = min(layers, HASH_LAYERS if count is None else int(count))
        given = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    if len(given) < layers or set(given) - set(MLP_TYPES):
        raise ValueError(
            f"mlp_layer_types must name {layers} layers, each one of {MLP_TYPES}, got {list(given)}"
        )
    return tuple(given[:layers])


def ropes(hf: dict[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of window layers and of compressed ones, which alone are scaled (without YaRN's factor on
    cos and sin)."""
    sets = hf.get("rope_parameters") or {}
    shared = {k: hf[k] for k in ("max_position_embeddings",) if k in hf}
    if isinstance(sets.get("main"), Mapping) and isinstance(sets.get("compress"), Mapping):
        main, compress = dict(sets["main"]), dict(sets["compress"])
    else:
        scaling = dict(sets) | dict(hf.get("rope_scaling") or {})
        main = {"rope_theta": hf.get("rope_theta") or 10000.0}
        compress = scaling | {"rope_theta": hf.get("compress_rope_theta") or 160000.0}
        if (scaling.get("rope_type") or scaling.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
    dims = [rotated_dim(hf, sub, head_dim) for sub in (main, compress)]
    made = (
        RopeConfig.from_hf(shared | {"rope_parameters": sub}, dim)
        for sub, dim in zip((main, compress), dims, strict=True)
    )
    return tuple(made)


def rotated_dim(hf: dict[str, Any], rope: dict[str, Any], head_dim: int) -> int:
    for factor in (rope.get("partial_rotary_factor"), hf.get("partial_rotary_factor")):
        if factor is not None:
            return int(head_dim * float(factor))
    return int(hf["qk_rope_head_dim"]) if hf.get("qk_rope_head_dim") else head_dim // 8
