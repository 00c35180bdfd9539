"""Small GGUF files, written with the `gguf` package: a random model, or metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 32, 4, 2, 64
BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": FEED_FORWARD,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One value of the kind its Python type stands for."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def dense_tensors(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    make = lambda *shape: (rng.standard_normal(shape) * 0.3).astype(np.float32)  # noqa: E731
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }
    tensors = {"token_embd.weight": make(tokens, HIDDEN), "output.weight": make(tokens, HIDDEN)}
    tensors["output_norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(BASE["block_count"]):
        tensors |= {f"blk.{i}.{n}.weight": make(*s) for n, s in shapes.items()}
        tensors |= {
            f"blk.{i}.{n}_norm.weight": np.ones(HIDDEN, np.float32) for n in ("attn", "ffn")
        }
    return tensors


def write(
    path: Path,
    *,
    arch: str = "llama",
    special: tuple[str, ...] = ("<s>", "</s>"),
    types: Mapping[str, int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    split: int = 0,
) -> list[str]:
    """Writes a model and returns its tokens: the 256 byte letters, "he" (a merge), then `special`.

    types: token -> tokenizer.ggml.token_type, where it is not 3 (control) for special ones.
    metadata: keys behind the architecture, or whole keys where they begin with a dot; None leaves
    one out. tokenizer: keys behind "tokenizer.ggml.". split: tensors per file, 0: one file.
    """
    tokens = [*BYTES, "he", *special]
    options = {"split_max_tensors": split} if split else {}
    writer = gguf.GGUFWriter(str(path), arch, **options)
    for key, value in {**BASE, **(metadata or {})}.items():
        if value is not None:
            add(writer, key[1:] if key.startswith(".") else f"{arch}.{key}", value)
    own = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 257 + [(types or {}).get(t, 3) for t in special],
        "merges": ["h e"],
        **(tokenizer or {}),
    }
    for key, value in own.items():
        if value is not None:
            add(writer, f"tokenizer.ggml.{key}", value)
    given = dense_tensors(len(tokens)) if tensors is None else tensors
    for name, value in given.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens
