"""GGUF files into Hugging Face style folders: config.json, model.safetensors, tokenizer.json,
generation_config.json.

Tensor data streams through in pieces of a few MiB. Names and layouts follow llama.cpp's conversion
script, undone here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from deepinfer_jax.models.gguf_tokenizer import write_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""general.architecture -> architecture in config.json."""

DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
CHUNK_ELEMENTS = 2 << 20

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SKIPPED = ("rope_freqs.weight",)  # config.json says the same as rope parameters


class GGUFFile:
    """Metadata and tensors of one file. ValueError when it is not GGUF or is one part of a split
    model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
        if self.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is part of a GGUF model split over {self.get('split.count')} files; merge"
                " them first"
            )
        self.arch = self.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"{path}: GGUF architecture {self.arch!r} is not supported; supported:"
                f" {sorted(ARCHITECTURES)}"
            )
        self.tensors = {t.name: t for t in self.reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture."""
        field = self.reader.get_field(key.replace("{arch}", getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ValueError(f"{self.path} lacks {key.replace('{arch}', self.arch)}")
        return value


@dataclass(frozen=True)
class _Output:
    """One tensor to write: its name, shape and the pieces of float32 rows it is made of."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]


def convert_gguf(source: Path, folder: Path, dtype: str = "float32") -> None:
    """Writes the model of `source` into the existing, empty `folder`; weights dequantised to
    `dtype` (float32 or bfloat16).

    Raises ValueError naming an unsupported architecture, rope type, tokenizer or tensor.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {sorted(DTYPES)}")
    file = GGUFFile(source)
    config = hf_config(file) | {"dtype": dtype}
    _write_json(folder / "config.json", config)
    ids = {
        k: config[k]
        for k in ("bos_token_id", "eos_token_id", "pad_token_id")
        if config.get(k) is not None
    }
    _write_json(folder / "generation_config.json", ids)
    write_tokenizer(file.get, folder)
    write_safetensors(folder / "model.safetensors", _outputs(file, config), dtype)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json's content from a GGUF file's metadata."""
    if file.get("{arch}.expert_count", 0):
        raise ValueError(f"{file.path}: GGUF models with experts are not supported")
    heads, hidden = (
        int(file.need("{arch}.attention.head_count")),
        int(file.need("{arch}.embedding_length")),
    )
    head_dim = int(file.get("{arch}.attention.key_length") or hidden // heads)
    return {
        "architectures": [ARCHITECTURES[file.arch]],
        "model_type": file.arch,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(file.need("{arch}.feed_forward_length")),
        "num_hidden_layers": int(file.need("{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("{arch}.attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(file.need("{arch}.context_length")),
        "rms_norm_eps": _shortest(file.need("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, head_dim),
        "hidden_act": "silu",
        "attention_bias": file.arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(file),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: float) -> float:
    """GGUF holds float32; 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _eos_ids(file: GGUFFile) -> int | list[int] | None:
    ids = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    unique = list(dict.fromkeys(int(i) for i in ids if i is not None))
    return unique[0] if len(unique) == 1 else unique or None


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    theta = _shortest(file.get("{arch}.rope.freq_base", 10000.0))
    if int(file.get("{arch}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{file.path}: rotating only a part of each head is not supported")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{file.path}: rope scaling {kind!r} is not supported; supported: 'none', 'linear',"
            " 'yarn'"
        )
    rope = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _shortest(file.need("{arch}.rope.scaling.factor")),
    }
    if kind == "yarn":
        rope["original_max_position_embeddings"] = int(
            file.need("{arch}.rope.scaling.original_context_length")
        )
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF holds as one divisor per frequency: recovered and checked
    against those divisors."""
    from deepinfer_jax.models.layers.rope import RopeConfig, inv_frequencies

    divisors = np.asarray(file.tensors["rope_freqs.weight"].data, np.float32).reshape(-1)
    scaling = {
        "factor": float(round(float(divisors.max()), 4)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = RopeConfig(head_dim, theta, "llama3", original_max_position=8192, **scaling)
    expected = inv_frequencies(RopeConfig(head_dim, theta)) / inv_frequencies(config)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(
            f"{file.path}: its rope_freqs are not those of Llama 3.1's scaling, and no other is"
            " supported"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "original_max_position_embeddings": 8192,
        **scaling,
    }


def _outputs(file: GGUFFile, config: dict[str, Any]) -> list[_Output]:
    """Every tensor under its Hugging Face name; ValueError naming those that have none."""
    outputs, unknown = [], []
    for tensor in file.reader.tensors:
        if tensor.name in _SKIPPED:
            continue
        if (name := hf_name(tensor.name)) is None:
            unknown.append(tensor.name)
            continue
        heads = None
        if file.arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config[
                "num_attention_heads" if name.split(".")[-2] == "q_proj" else "num_key_value_heads"
            ]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        outputs.append(_Output(name, shape, lambda t=tensor, h=heads, s=shape: _pieces(t, s, h)))
    if unknown:
        raise ValueError(
            f"{file.path} has tensors without a known meaning for {file.arch!r}:"
            f" {', '.join(unknown)}"
        )
    return outputs


def hf_name(name: str) -> str | None:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; None when the name is not
    known."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    return (
        f"model.layers.{layer}.{_LAYER[part]}.{kind}" if block == "blk" and part in _LAYER else None
    )


def _pieces(
    tensor: gguf.ReaderTensor, shape: tuple[int, ...], heads: int | None
) -> Iterator[np.ndarray]:
    """Dequantised rows in order. heads: the rows of each head lie with rotary pairs interleaved;
    put halves one after the other."""
    if heads is not None:
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        yield unpermute(rows, heads)
        return
    step = max(1, CHUNK_ELEMENTS // int(np.prod(shape[1:], dtype=np.int64)))
    for start in range(0, shape[0], step):
        yield gguf.quants.dequantize(tensor.data[start : start + step], tensor.tensor_type)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * D, ...] with each head's rows as (0, D/2, 1, D/2 + 1, ...) -> in order 0
    .. D - 1."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_safetensors(path: Path, outputs: list[_Output], dtype: str) -> None:
    """A safetensors file written tensor by tensor; float32 pieces are cast to `dtype`."""
    code, numpy_dtype = DTYPES[dtype]
    header, offset = {}, 0
    for out in outputs:
        end = offset + int(np.prod(out.shape, dtype=np.int64)) * numpy_dtype.itemsize
        header[out.name] = {"dtype": code, "shape": list(out.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for out in outputs:
            for piece in out.pieces():
                handle.write(np.ascontiguousarray(piece.astype(numpy_dtype, copy=False)).tobytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
