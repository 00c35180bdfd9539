"""Checkpoints whose names differ from what the models' rules say, without being other models."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.checkpoint import Checkpoint, TensorInfo

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_ROWS = 4096


def add_prefix(checkpoint: Checkpoint) -> None:
    """Names without "model." in front, as a base model is saved, get it; the head stays."""
    names = checkpoint.tensors
    if any(name.startswith("model.") for name in names):
        return
    checkpoint.tensors = {
        name if name.startswith("lm_head.") else f"model.{name}": info
        for name, info in names.items()
    }


def rename(checkpoint: Checkpoint, canonical: Callable[[str], str]) -> None:
    """Gives every tensor the name that a model's rules use for it (`WeightRules.canonical`).

    Raises CheckpointError where two tensors get the same one.
    """
    renamed: dict[str, TensorInfo] = {}
    spelled: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        new = canonical(name)
        if new in renamed:
            raise CheckpointError(
                f"{checkpoint.folder}: {spelled[new]} and {name} both stand for {new}"
            )
        renamed[new], spelled[new] = info, name
    checkpoint.tensors = renamed


def settle_tie(checkpoint: Checkpoint, tied: bool) -> bool:
    """Whether embedding and head are one, as transformers decides it.

    A tie may be stored at either end. Where both stand there with different values, they are two,
    whatever the configuration says.
    """
    if not tied or HEAD not in checkpoint.tensors:
        return tied
    if EMBEDDING not in checkpoint.tensors:
        checkpoint.tensors[EMBEDDING] = checkpoint.tensors.pop(HEAD)
        return True
    if _equal(checkpoint, EMBEDDING, HEAD):
        return True
    logger.warning(
        "%s: tie_word_embeddings is set, but %s and %s differ: they are not tied",
        checkpoint.folder,
        EMBEDDING,
        HEAD,
    )
    return False


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    a, b = checkpoint.read(first), checkpoint.read(second)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    starts = range(0, max(1, len(a)), _CHUNK_ROWS) if a.ndim else range(1)
    same = all(
        np.array_equal(a[i : i + _CHUNK_ROWS], b[i : i + _CHUNK_ROWS], equal_nan=True)
        if a.ndim
        else a == b
        for i in starts
    )
    checkpoint.release(first)
    checkpoint.release(second)
    return bool(same)
