"""Qwen's dense decoders: Llama's layers with biased q, k and v (Qwen2) or normalised query and key
heads (Qwen3)."""

from __future__ import annotations

from typing import Any

from deepinfer_jax.models.llama import DenseConfig, Llama, dense_config, layer_windows


def qwen_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Windows apply only with use_sliding_window, and then from layer max_window_layers on (or as
    layer_types says)."""
    layers = int(hf.get("num_hidden_layers") or 0)
    if not hf.get("use_sliding_window", False):
        return (None,) * layers
    if not hf.get("sliding_window"):
        raise ValueError("use_sliding_window is set but sliding_window is not")
    first = int(hf.get("max_window_layers", 28))
    return layer_windows(
        hf, tuple(int(hf["sliding_window"]) if i >= first else None for i in range(layers))
    )


class Qwen2(Llama):
    """Qwen2ForCausalLM (Qwen2 and Qwen2.5)."""

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DenseConfig:
        return dense_config(hf, windows=qwen_windows(hf), qkv_bias=True)


class Qwen3(Llama):
    """Qwen3ForCausalLM, dense."""

    @classmethod
    def config_from_hf(cls, hf: dict[str, Any]) -> DenseConfig:
        bias = bool(hf.get("attention_bias", False))
        hf = {"head_dim": 128, **hf}
        return dense_config(
            hf, windows=qwen_windows(hf), qkv_bias=bias, out_bias=bias, qk_norm=True
        )
