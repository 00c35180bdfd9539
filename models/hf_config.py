"""Reading Hugging Face model folders' JSON files, and the checks every model's `config_from_hf`
shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_jax.models.layers.rope_parameters import scaled_length


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ValueError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def read_folder_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; ValueError naming the folder when it has none."""
    if not folder.is_dir():
        raise ValueError(f"no such model folder: {folder}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    return read_json(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a model folder; {} when it has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


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
    return {
        "model_type": str(hf.get("model_type", "")),
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": int(hf["hidden_size"]),
        "num_layers": int(hf["num_hidden_layers"]),
        "max_position_embeddings": scaled_length(hf),
        "num_heads": heads,
        "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
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
