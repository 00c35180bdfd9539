"""Which metadata of a GGUF file is read, which says nothing about results, and which is refused.

A key of the architecture or of the tokenizer that is not known is refused unless it is off: it
would change what the model computes.
"""

from __future__ import annotations

from typing import Any

from deepinfer_jax.models.gguf.reader import GGUFFile

_ROPE = {
    f"rope.{name}"
    for name in (
        "dimension_count",
        "freq_base",
        "scale_linear",
        "scaling.type",
        "scaling.factor",
        "scaling.attn_factor",
        "scaling.original_context_length",
        "scaling.finetuned",
        "scaling.yarn_log_multiplier",
        "scaling.yarn_ext_factor",
        "scaling.yarn_attn_factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
    )
}
_DENSE = _ROPE | {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
}
_MOE = _DENSE | {"expert_count", "expert_used_count", "expert_feed_forward_length"}
READ: dict[str, set[str]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3moe": _MOE | {"expert_weights_norm"},
    "deepseek2": _MOE
    | {
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "expert_shared_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "leading_dense_block_count",
        "nextn_predict_layers",
    },
}
"""general.architecture -> the keys behind it that the conversion reads."""

_HARMLESS = {"tensor_data_layout", "pooling_type", "attention.layer_norm_epsilon"}
_OFF: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.output_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "interleave_moe_layer_step": (0, 1),
}
"""Key -> values that change nothing, besides 0, false and what is empty."""

_TOKENIZER = {
    "model",
    "pre",
    "tokens",
    "token_type",
    "token_type_count",
    "scores",
    "merges",
    "bos_token_id",
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "unknown_token_id",
    "padding_token_id",
    "seperator_token_id",
    "mask_token_id",
    "cls_token_id",
    "prefix_token_id",
    "suffix_token_id",
    "middle_token_id",
    "fim_pre_token_id",
    "fim_suf_token_id",
    "fim_mid_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "remove_extra_whitespaces",
    "precompiled_charsmap",
}
"""The last two are read by llama.cpp for models of another kind only."""


def check_metadata(file: GGUFFile) -> None:
    """Raises CheckpointError naming every key that is neither known nor off."""
    if file.arch not in READ:
        raise file.fail(
            "general.architecture",
            f"GGUF architecture {file.arch!r} is not supported; supported: {sorted(READ)}",
        )
    if (kind := file.text("general.type", "model")) != "model":
        raise file.fail("general.type", f"must be 'model', got {kind!r}")
    unknown = [key for key, value in file.metadata.items() if _changes_results(file, key, value)]
    if unknown:
        raise file.fail(
            ", ".join(sorted(unknown)), "not supported, and would change what the model computes"
        )


def _changes_results(file: GGUFFile, key: str, value: Any) -> bool:
    if key.startswith("tokenizer.ggml."):
        return key.removeprefix("tokenizer.ggml.") not in _TOKENIZER and not _empty(value)
    if not key.startswith(f"{file.arch}."):
        return False
    name = key.removeprefix(f"{file.arch}.")
    if name in READ[file.arch] | _HARMLESS or _empty(value):
        return False
    if name == "attention.sliding_window":  # a window wider than the context hides nothing
        return value < file.integer("{arch}.context_length")
    return value not in _OFF.get(name, ())


def _empty(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(v in (0, 0.0, False, "") for v in values)
