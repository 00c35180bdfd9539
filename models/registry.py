"""Which class runs which checkpoint. Names are config.json's `architectures` entries and, without
them, its `model_type`."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "LlamaForCausalLM": ("llama", "deepinfer_jax.models.llama:Llama"),
    "MistralForCausalLM": ("mistral", "deepinfer_jax.models.llama:Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "deepinfer_jax.models.qwen:Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "deepinfer_jax.models.qwen:Qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "deepinfer_jax.models.qwen3_moe:Qwen3Moe"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "deepinfer_jax.models.deepseek:DeepseekV2"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "deepinfer_jax.models.deepseek:DeepseekV3"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "deepinfer_jax.models.deepseek_v4:DeepseekV4"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "deepinfer_jax.models.deepseek_v32:DeepseekV32"),
}

MODELS: dict[str, str] = {
    name: place for arch, (model_type, place) in _MODULES.items() for name in (arch, model_type)
}
"""Architecture or model_type -> "module:class"; imported when resolved, so that one model does not
load the others."""


def supported() -> list[str]:
    """The architectures that `resolve` accepts."""
    return sorted(_MODULES)


def resolve(hf_config: dict[str, Any]) -> type:
    """The model class for a config.json; ValueError naming the architecture and the
    supported ones."""
    names = list(hf_config.get("architectures") or filter(None, [hf_config.get("model_type")]))
    for name in names:
        if name in MODELS:
            module, _, cls = MODELS[name].partition(":")
            return getattr(importlib.import_module(module), cls)
    raise ValueError(
        f"architecture {', '.join(names) or '(none named)'} is not supported; supported:"
        f" {supported()}"
    )
