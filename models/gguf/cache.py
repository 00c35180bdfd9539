"""Converted models, kept in a cache folder: made once, complete or absent, whatever several
processes do at once."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from deepinfer_jax.kernels_pallas.private_files import (
    ForeignFileError,
    cache_root,
    locked,
    private_folder,
)
from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.gguf.convert import convert_gguf
from deepinfer_jax.models.gguf.reader import parts_of

CONVERTER_VERSION = 2
"""Part of every cache name; raise it when convert_gguf would write something else."""


def cached_folder(name: str, fill: Callable[[Path], None]) -> Path:
    """`<cache>/models/<name>`, made by `fill(empty folder)` when absent.

    Filled under another name and renamed when complete, while holding a lock: a second process
    waits for the first, and what a killed process left behind is removed by the next. What is
    there already serves from a cache that is read-only. Raises OSError saying what to set where a
    folder cannot be made.
    """
    folder = cache_root() / "models" / f"{name}-v{CONVERTER_VERSION}"
    try:
        private_folder(folder.parent)
    except OSError as error:
        if folder.is_dir() and not isinstance(error, ForeignFileError):
            return folder
        raise OSError(
            f"no folder for the converted model: {error}; DEEPINFER_CACHE_DIR may name one that can"
            " be written"
        ) from error
    if folder.is_dir():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    with locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                fill(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def converted_folder(source: Path) -> Path:
    """The folder that a GGUF file converts to; converted again when size or time of change of it,
    or of one of its parts, differ.

    Raises CheckpointError when there is no such file or it is not supported.
    """
    source = source.absolute()  # a link, as hub caches have them, keeps its own name
    if not source.is_file():
        raise CheckpointError(f"no such file: {source}")
    parts = parts_of(source)
    stats = [(part, part.stat()) for part in parts]
    described = "\0".join(f"{part}\0{s.st_size}\0{s.st_mtime_ns}" for part, s in stats)
    key = hashlib.sha256(described.encode()).hexdigest()[:16]
    return cached_folder(f"{source.stem}-{key}", lambda folder: convert_gguf(parts[0], folder))
