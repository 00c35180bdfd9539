"""GGUF files into Hugging Face style folders: config.json, model.safetensors, tokenizer.json,
generation_config.json. Tensor data streams through in pieces of a few MiB."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.models.gguf.config import hf_config
from deepinfer_jax.models.gguf.metadata import check_metadata
from deepinfer_jax.models.gguf.reader import GGUFFile
from deepinfer_jax.models.gguf.tensors import Output, outputs
from deepinfer_jax.models.gguf.tokenizer import write_tokenizer

DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}


def convert_gguf(source: Path, folder: Path, dtype: str = "float32") -> None:
    """Writes the model of `source` into the existing, empty `folder`; weights dequantised to
    `dtype` (float32 or bfloat16).

    Raises CheckpointError naming the key, tensor or tokenizer that is damaged or not supported.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {sorted(DTYPES)}")
    file = GGUFFile(source)
    check_metadata(file)
    config = hf_config(file) | {"dtype": dtype}
    tensors = outputs(file, config)
    _write_json(folder / "config.json", config)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {k: config[k] for k in names if config.get(k) is not None}
    _write_json(folder / "generation_config.json", ids)
    write_tokenizer(file, folder)
    write_safetensors(folder / "model.safetensors", tensors, dtype)


def write_safetensors(path: Path, tensors: list[Output], dtype: str) -> None:
    """A safetensors file written tensor by tensor; float32 pieces are cast to `dtype`."""
    code, numpy_dtype = DTYPES[dtype]
    header, offset = {}, 0
    for out in tensors:
        end = offset + int(np.prod(out.shape, dtype=np.int64)) * numpy_dtype.itemsize
        header[out.name] = {"dtype": code, "shape": list(out.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for out in tensors:
            for piece in out.pieces():
                handle.write(np.ascontiguousarray(piece.astype(numpy_dtype, copy=False)).tobytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
