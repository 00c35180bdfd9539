"""config.json's content from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from deepinfer_jax.models.gguf.end_tokens import end_token_ids, special_id
from deepinfer_jax.models.gguf.reader import GGUFFile
from deepinfer_jax.models.gguf.rope import rope_parameters

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
}
"""general.architecture -> architecture and model_type in config.json. deepseek2 with sigmoid gates
is DeepSeek-V3."""
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Raises CheckpointError naming a missing or unsupported key."""
    if "token_embd.weight" not in file.tensors:
        raise file.fail("token_embd.weight", "the file lacks this tensor")
    architecture, model_type = ARCHITECTURES[file.arch]
    heads, hidden = (
        file.integer("{arch}.attention.head_count"),
        file.integer("{arch}.embedding_length"),
    )
    if not heads:
        raise file.fail("{arch}.attention.head_count", "must be positive, got 0")
    eos = end_token_ids(file)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "hidden_size": hidden,
        "num_hidden_layers": file.integer("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("{arch}.attention.head_count_kv", heads) or heads,
        "max_position_embeddings": file.integer("{arch}.context_length"),
        "rms_norm_eps": file.number("{arch}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": special_id(file, "bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": special_id(file, "padding"),
    }
    return config | (_latent(file, heads) if file.arch == "deepseek2" else _heads(file, config))


def _heads(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    width = config["hidden_size"] // config["num_attention_heads"]
    head_dim = file.integer("{arch}.attention.key_length", width) or width
    if (value := file.integer("{arch}.attention.value_length", head_dim)) != head_dim:
        raise file.fail("{arch}.attention.value_length", f"{value} differs from key_length")
    own: dict[str, Any] = {
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(file, head_dim),
        "attention_bias": file.arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "intermediate_size": file.integer("{arch}.feed_forward_length", 0),
    }
    if file.arch == "llama":
        own["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if file.arch != "qwen3moe":
        return own
    width = file.integer("{arch}.expert_feed_forward_length")
    return own | {
        "intermediate_size": own["intermediate_size"] or width,
        "moe_intermediate_size": width,
        "num_experts": file.integer("{arch}.expert_count"),
        "num_experts_per_tok": file.integer("{arch}.expert_used_count"),
        "norm_topk_prob": file.flag("{arch}.expert_weights_norm", True),  # llama.cpp's default
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _latent(file: GGUFFile, heads: int) -> dict[str, Any]:
    """DeepSeek's latent attention and routing. key_length_mla is there where key_length is that of
    the compressed form."""
    rope_dim = file.integer("{arch}.rope.dimension_count")
    length = "{arch}.attention.key_length"
    if file.get(f"{length}_mla") is not None:
        length += "_mla"
    nope_dim = file.integer(length) - rope_dim
    if nope_dim < 1 or rope_dim < 1:
        raise file.fail(length, f"must exceed rope.dimension_count {rope_dim}")
    value = "{arch}.attention.value_length"
    value_dim = file.integer(f"{value}_mla", file.integer(value))
    gating = file.integer("{arch}.expert_gating_func", 0) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise file.fail("{arch}.expert_gating_func", f"{gating} is not supported")
    normalize = file.flag("{arch}.expert_weights_norm", False)
    if gating == SOFTMAX and normalize:
        raise file.fail("{arch}.expert_weights_norm", "not supported with softmax gates")
    groups = file.integer("{arch}.expert_group_count", 0) or 1
    own = {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": nope_dim,
        "v_head_dim": value_dim,
        "kv_lora_rank": file.integer("{arch}.attention.kv_lora_rank"),
        "q_lora_rank": file.integer("{arch}.attention.q_lora_rank", 0) or None,
        "rope_parameters": rope_parameters(file, rope_dim),
        "intermediate_size": file.integer("{arch}.feed_forward_length"),
        "moe_intermediate_size": file.integer("{arch}.expert_feed_forward_length"),
        "n_routed_experts": file.integer("{arch}.expert_count"),
        "num_experts_per_tok": file.integer("{arch}.expert_used_count"),
        "n_shared_experts": file.integer("{arch}.expert_shared_count", 0),
        "first_k_dense_replace": file.integer("{arch}.leading_dense_block_count", 0),
        "routed_scaling_factor": file.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": normalize,
        "n_group": groups,
        "topk_group": file.integer("{arch}.expert_group_used_count", 0) or groups,
    }
    if gating == SIGMOID:
        names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        return own | names | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return own | {"scoring_func": "softmax", "topk_method": method}
