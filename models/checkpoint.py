"""Safetensors folders, read through memory maps: only the rows that are asked for are touched."""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.model_files import CheckpointError, read_json

SAFETENSORS_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` and `nbytes` in bytes from the start of its file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of a folder's safetensors files (see `weight_files`). A context manager.

    Raises CheckpointError when the folder has no safetensors weights, a shard is missing, a tensor
    stands in two of them, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        files, places = weight_files(folder)
        for file in files:
            for name, info in _read_header(file):
                if places.get(name, file) != file:
                    continue
                if name in self.tensors:
                    both = f"{self.tensors[name].file.name} and {file.name}"
                    raise CheckpointError(f"{folder}: tensor {name} stands in both {both}")
                self.tensors[name] = info

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the files; a map that a live view still uses is unmapped with the view."""
        self._maps.clear()

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the whole tensor; pages are read when touched. Call `release` when
        done with it."""
        info = self.tensors[name]
        data = np.frombuffer(self._map(info.file), np.uint8, info.nbytes, info.offset)
        return data.view(info.dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Drops the tensor's pages from this process, so that a load does not count the
        file twice."""
        info = self.tensors[name]
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.offset + info.nbytes - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map(info.file).madvise(mmap.MADV_DONTNEED, start, length)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """(the safetensors files of a model folder, the file of each tensor where an index says it).

    model.safetensors wins over an index beside it, as in transformers; then come the shards that
    model.safetensors.index.json names, then a complete set of shards without an index.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole], {}
    if index.is_file():
        places = _read_index(index)
        files = sorted(set(places.values()))
    else:
        places, files = {}, _numbered_shards(folder) or [whole]
    if missing := [file.name for file in files if not file.is_file()]:
        others = sorted(f.name for f in folder.glob("pytorch_model*.bin"))[:1]
        hint = f"; {others[0]} must be converted to safetensors first" if others else ""
        raise CheckpointError(f"{folder} lacks weight files: {', '.join(missing)}{hint}")
    return files, places


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] must name a file of this folder, got {file!r}"
            )
    return {name: index.parent / file for name, file in weight_map.items()}


def _numbered_shards(folder: Path) -> list[Path]:
    """model-00001-of-0000N.safetensors to the N-th, whether or not they exist; [] without any."""
    counts = set()
    for file in folder.glob("model-*-of-*.safetensors"):
        if match := re.fullmatch(r"model-\d{5}-of-(\d{5})\.safetensors", file.name):
            counts.add(match.group(1))
    if len(counts) > 1:
        raise CheckpointError(f"{folder} has shards of {sorted(counts)} files and no index")
    return [
        folder / f"model-{i:05d}-of-{count}.safetensors"
        for count in counts
        for i in range(1, int(count) + 1)
    ]


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    """The safetensors header: u64 length, JSON, then the data
    (https://huggingface.co/docs/safetensors)."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} is not a safetensors file or is truncated: {size} bytes, header of"
                f" {length}"
            )
        try:
            header = json.loads(handle.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged safetensors header: it is no JSON object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _tensor_info(file, name, entry, 8 + length, size)


def _tensor_info(file: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has a damaged entry: {entry!r}")
    code, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str) or code not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{where} has dtype {code!r}, which is not supported")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has shape {shape!r} at {offsets!r}")
    dtype, (begin, end) = SAFETENSORS_DTYPES[code], offsets
    if end - begin != dtype.itemsize * math.prod(shape) or base + end > size:
        raise CheckpointError(
            f"{where} {tuple(shape)} does not fit the file, which is truncated or damaged"
        )
    return TensorInfo(file, dtype, tuple(shape), base + begin, end - begin)


def _sizes(values: Any) -> bool:
    """Whether this is a list of whole numbers >= 0."""
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
