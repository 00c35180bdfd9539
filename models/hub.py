"""Model ids of the Hugging Face hub ("org/name"): found in the local cache, else downloaded by
huggingface_hub where that is installed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.checkpoint import weight_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.jinja2", "tokenizer.model", "merges.txt")
"""What is downloaded: weights in one format, and the descriptions of model and tokenizer."""


def hub_folder(model: str) -> Path:
    """The snapshot of `model` ("org/name") in the cache; downloaded first when it is not complete
    there.

    Raises CheckpointError where it can neither be found nor downloaded, saying why.
    """
    cached = cached_snapshot(model)
    if cached is not None:
        return cached
    where = f"{model} is neither a folder nor complete in the Hugging Face cache {hub_cache()}"
    if _is_offline():
        raise CheckpointError(f"{where}, and HF_HUB_OFFLINE forbids to download it")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{where}; to download it: pip install 'deepinfer-jax[hub]'"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, cache_dir=hub_cache(), allow_patterns=list(PATTERNS)
            )
        )
    except Exception as error:  # of the network, the hub or the disk: whatever its client raises
        raise CheckpointError(f"{where}, and cannot be downloaded: {error}") from error


def cached_snapshot(model: str) -> Path | None:
    """The newest complete snapshot that the cache has of the main branch; None without one."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = folder / "snapshots" / reference.read_text(encoding="utf-8").strip()
    if not (snapshot / "config.json").is_file():
        return None
    try:
        weight_files(snapshot)
    except CheckpointError:  # another tool has fetched a part of it
        return None
    return snapshot


def hub_cache() -> Path:
    """$HF_HUB_CACHE, else $HF_HOME/hub, else $XDG_CACHE_HOME/huggingface/hub, else ~/.cache/...: as
    huggingface_hub has it."""
    if own := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(own).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in names)
