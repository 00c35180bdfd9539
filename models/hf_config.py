"""Reading Hugging Face model folders' JSON files, and the checks every model's `config_from_hf`
shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer_jax.model_files import CheckpointError, read_json, read_json_if_there
from deepinfer_jax.models.layers.rope_parameters import number, scaled_length

_INTEGERS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "num_hidden_layers": (1, 1 << 12),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 14),
    "max_position_embeddings": (1, (1 << 31) - 1),
    "sliding_window": (0, (1 << 31) - 1),
    "max_window_layers": (0, 1 << 12),
    "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16),
    "n_routed_experts": (0, 1 << 16),
    "num_experts_per_tok": (0, 1 << 16),
    "n_shared_experts": (0, 1 << 10),
    "moe_intermediate_size": (1, 1 << 22),
    "first_k_dense_replace": (0, 1 << 12),
    "num_nextn_predict_layers": (0, 1 << 10),
    "n_group": (1, 1 << 16),
    "topk_group": (1, 1 << 16),
    "kv_lora_rank": (1, 1 << 20),
    "q_lora_rank": (0, 1 << 20),
    "qk_nope_head_dim": (1, 1 << 14),
    "qk_rope_head_dim": (1, 1 << 14),
    "v_head_dim": (1, 1 << 14),
    "decoder_sparse_step": (1, 1 << 12),
}
"""Key -> smallest and largest value. The largest are far above every model there is: what exceeds
them would be built for hours before anything notices."""
_NUMBERS = ("rms_norm_eps", "routed_scaling_factor")
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "rope_interleave",
)
_LISTS = ("architectures", "layer_types", "mlp_only_layers")


def read_folder_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, its values checked. Raises CheckpointError naming the folder
    when it has none, or the key whose value is of a wrong kind or out of range."""
    if not folder.is_dir():
        raise CheckpointError(f"no such model folder: {folder}")
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no config.json")
    hf = read_json(file)
    try:
        check_values(hf)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return hf


def check_values(hf: dict[str, Any]) -> None:
    """ValueError naming the first key whose value is of a wrong kind or out of range."""
    for key, (low, high) in _INTEGERS.items():
        value = hf.get(key)
        if value is not None and not (_is_whole(value) and low <= value <= high):
            raise ValueError(f"{key} must be a whole number in [{low}, {high}], got {value!r}")
    for key in _NUMBERS:
        if hf.get(key) is not None:
            number(key, hf[key])
    for key in _FLAGS:
        if not isinstance(hf.get(key), bool | None):
            raise ValueError(f"{key} must be true or false, got {hf[key]!r}")
    for key in _LISTS:
        if not isinstance(hf.get(key), list | None):
            raise ValueError(f"{key} must be a list, got {hf[key]!r}")
    eos = hf.get("eos_token_id")
    ids = [*(eos if isinstance(eos, list) else [eos]), hf.get("bos_token_id")]
    if bad := [i for i in ids if i is not None and not (type(i) is int and 0 <= i < 2**31)]:
        raise ValueError(f"eos_token_id and bos_token_id must be token ids, got {bad[0]!r}")
    if not all(isinstance(name, str) for name in hf.get("architectures") or ()):
        raise ValueError(f"architectures must be names, got {hf['architectures']!r}")
    if not isinstance(hf.get("quantization_config"), dict | None):
        raise ValueError(
            f"quantization_config must be an object, got {hf['quantization_config']!r}"
        )


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a model folder; {} when it has none."""
    return read_json_if_there(folder / "generation_config.json")


def require(hf: dict[str, Any], *keys: str) -> None:
    """ValueError naming every key that config.json lacks."""
    if missing := [key for key in keys if hf.get(key) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def require_silu(hf: dict[str, Any]) -> None:
    """ValueError naming hidden_act unless it is SiLU."""
    if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act {act!r} is not supported; supported: 'silu'")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """eos_token_id as checkpoints spell it (absent, one id or several) -> a tuple."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def common_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields that every model's config has, under our names; a head's width defaults to
    hidden_size / heads. max_position_embeddings includes what rope scaling makes of it.

    Raises ValueError naming missing keys.
    """
    require(
        hf,
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    heads = int(hf["num_attention_heads"])
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads and not hf.get("kv_lora_rank"):  # latent attention has no kv heads
        raise ValueError(f"num_key_value_heads must divide {heads} heads, got {kv_heads}")
    if not hf.get("head_dim") and int(hf["hidden_size"]) % heads:
        raise ValueError(f"hidden_size {hf['hidden_size']} does not divide into {heads} heads")
    return {
        "model_type": str(hf.get("model_type", "")),
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": int(hf["hidden_size"]),
        "num_layers": int(hf["num_hidden_layers"]),
        "max_position_embeddings": scaled_length(hf),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": int(hf.get("head_dim") or hf["hidden_size"] // heads),
        "rms_norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
        "bos_token_id": hf.get("bos_token_id"),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }


def checkpoint_quantization(hf: dict[str, Any]) -> str | None:
    """How the checkpoint's weights are quantised: None or "fp8" (e4m3, 128x128 blocks, as
    DeepSeek-V3 is published).

    Raises ValueError naming the method or block size when it is another one.
    """
    quantization = hf.get("quantization_config")
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8":
        raise ValueError(
            f"checkpoints quantised with {method!r} are not supported; supported: 'fp8' with"
            " 128x128 blocks"
        )
    if block is None or list(block) != [128, 128]:
        raise ValueError(
            f"fp8 checkpoints with weight_block_size {block} are not supported; supported: [128,"
            " 128]"
        )
    return "fp8"
