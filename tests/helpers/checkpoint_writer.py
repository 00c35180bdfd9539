"""Writes safetensors folders with NumPy alone, float8 included, and reads them back."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from deepinfer_jax.models.checkpoint import SAFETENSORS_DTYPES, Checkpoint
from deepinfer_jax.models.layers.quant import expand_blocks, quant_format

CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    header, offset = {}, 0
    for name, t in tensors.items():
        header[name] = {
            "dtype": CODES[t.dtype],
            "shape": t.shape,
            "data_offsets": [offset, offset + t.nbytes],
        }
        offset += t.nbytes
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            file.write(np.ascontiguousarray(t).tobytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_checkpoint(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    with Checkpoint(folder) as checkpoint:
        tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    return json.loads((folder / "config.json").read_text()), tensors


def is_quantized(name: str, tensor: np.ndarray) -> bool:
    """What DeepSeek quantises: the matrices of attention and feed-forward, experts included; not
    the router, embedding or head."""
    return tensor.ndim == 2 and "layers" in name and "mlp.gate.weight" not in name


def to_fp8(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(DeepSeek's fp8 block tensors, the float32 tensors they stand for)."""
    quantized, plain = {}, {}
    for name, t in tensors.items():
        quantized[name] = plain[name] = t
        if is_quantized(name, t):
            quantized[name], quantized[f"{name}_scale_inv"] = quant_format("fp8").quantize(
                t.astype(np.float32)
            )
            plain[name] = quantized[name].astype(np.float32) * expand_blocks(
                quantized[f"{name}_scale_inv"], *t.shape
            )
    return quantized, plain


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
