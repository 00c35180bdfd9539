"""GGUF tensors under their Hugging Face names and layouts.

Names and layouts follow llama.cpp's conversion script, undone here: rotary pairs of the llama
architecture lie interleaved, experts are stacked, and DeepSeek's kv_b_proj may be stored as its two
halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from deepinfer_jax.models.gguf.reader import GGUFFile, Tensor
from deepinfer_jax.models.gguf.rope import TENSORS as ROPE_TENSORS

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
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_BIAS = "exp_probs_b"
_KEYS, _VALUES = "attn_k_b", "attn_v_b"
_SKIPPED = (*ROPE_TENSORS,)  # config.json says the same as rope parameters


@dataclass(frozen=True)
class Output:
    """One tensor to write: its name, shape and the pieces of float32 rows it is made of."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]


def outputs(file: GGUFFile, config: dict[str, Any]) -> list[Output]:
    """Every tensor under its Hugging Face name; CheckpointError naming those that have none."""
    found, unknown = [], []
    for tensor in file.tensors.values():
        if tensor.name in _SKIPPED or tensor.name.endswith(".attn_rot_embd.weight"):
            continue
        made = list(_outputs_of(file, tensor, config))
        found += made
        if not made and not _is_value_half(file, tensor):
            unknown.append(tensor.name)
    if unknown:
        raise file.fail(", ".join(unknown), f"tensors without a known meaning for {file.arch!r}")
    return found


def hf_name(name: str) -> str | None:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; None when the name is not
    known."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    layer, part = _layer_and_part(stem)
    if part == _BIAS:
        return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else None


def _layer_and_part(stem: str) -> tuple[str, str]:
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    return (layer, part) if block == "blk" and layer.isdigit() else ("", "")


def _outputs_of(file: GGUFFile, tensor: Tensor, config: dict[str, Any]) -> Iterator[Output]:
    stem, _, kind = tensor.name.rpartition(".")
    layer, part = _layer_and_part(stem)
    if part in _EXPERTS and len(tensor.shape) == 3:
        for e in range(tensor.shape[0]):
            name = f"model.layers.{layer}.mlp.experts.{e}.{_EXPERTS[part]}.{kind}"
            yield Output(name, tensor.shape[1:], lambda e=e: _rows(file, tensor, tensor.data[e]))
        return
    if part == _KEYS:
        values = file.tensors.get(f"blk.{layer}.{_VALUES}.weight")
        if values is not None and len(tensor.shape) == len(values.shape) == 3:
            yield _joined(file, layer, tensor, values)
        return
    if (name := hf_name(tensor.name)) is None:
        return
    heads = None
    if file.arch == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if tensor.shape[0] % (2 * heads):
            raise file.fail(tensor.name, f"{tensor.shape} does not divide into {heads} heads")
    yield Output(name, tensor.shape, lambda: _pieces(file, tensor, heads))


def _is_value_half(file: GGUFFile, tensor: Tensor) -> bool:
    """Whether the tensor is written together with its other half."""
    layer, part = _layer_and_part(tensor.name.rpartition(".")[0])
    return part == _VALUES and f"blk.{layer}.{_KEYS}.weight" in file.tensors


def _joined(file: GGUFFile, layer: str, keys: Tensor, values: Tensor) -> Output:
    """kv_b_proj [H * (nope + v), rank] out of keys [H, rank, nope] and values [H, v, rank]."""
    heads, rank, nope = keys.shape
    rows = nope + values.shape[1]
    if values.shape[0] != heads or values.shape[2] != rank:
        raise file.fail(keys.name, f"{keys.shape} does not fit {values.name} {values.shape}")

    def pieces() -> Iterator[np.ndarray]:
        k = _dequantize(file, keys, keys.data).reshape(keys.shape)
        v = _dequantize(file, values, values.data).reshape(values.shape)
        yield np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(heads * rows, rank)

    return Output(f"model.layers.{layer}.self_attn.kv_b_proj.weight", (heads * rows, rank), pieces)


def _pieces(file: GGUFFile, tensor: Tensor, heads: int | None) -> Iterator[np.ndarray]:
    """Dequantised rows in order. heads: the rows of each head lie with rotary pairs interleaved;
    put halves one after the other."""
    if heads is None:
        yield from _rows(file, tensor, tensor.data)
    else:
        yield unpermute(_dequantize(file, tensor, tensor.data).reshape(tensor.shape), heads)


def _rows(file: GGUFFile, tensor: Tensor, data: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, CHUNK_ELEMENTS // max(1, int(np.prod(data.shape[1:], dtype=np.int64))))
    for start in range(0, data.shape[0], step):
        yield _dequantize(file, tensor, data[start : start + step])


def _dequantize(file: GGUFFile, tensor: Tensor, data: np.ndarray) -> np.ndarray:
    try:
        return gguf.quants.dequantize(data, tensor.kind)
    except NotImplementedError as error:
        raise file.fail(tensor.name, f"type {tensor.kind.name} is not supported") from error


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * D, ...] with each head's rows as (0, D/2, 1, D/2 + 1, ...) -> in order 0
    .. D - 1."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
