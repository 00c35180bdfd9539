"""Safetensors folders, read through memory maps: only the rows that are asked for are touched."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import ml_dtypes
import numpy as np

from deepinfer_jax.models.hf_config import read_json

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


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` and `nbytes` in bytes from the start of its file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of a folder's model.safetensors, or of the shards its index names. A context
    manager.

    Raises ValueError when the folder has no safetensors weights, a shard is missing, or a file is
    damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in weight_files(folder):
            self.tensors.update(_read_header(file))

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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the shards of model.safetensors.index.json, else
    model.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{folder} lacks weight files: {', '.join(missing)}")
    return files


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    """The safetensors header: u64 length, JSON, then the data
    (https://huggingface.co/docs/safetensors)."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= size - 8:
            raise ValueError(
                f"{file} is not a safetensors file or is truncated: {size} bytes, header of"
                f" {length}"
            )
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise ValueError(f"{file} has a damaged safetensors header: {error}") from error
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _tensor_info(file, name, entry, 8 + length, size)


def _tensor_info(file: Path, name: str, entry: dict, base: int, size: int) -> TensorInfo:
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(
            f"{file}: tensor {name} has dtype {entry['dtype']}, which is not supported"
        )
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)) or base + end > size:
        raise ValueError(
            f"{file}: tensor {name} {shape} does not fit the file, which is truncated or damaged"
        )
    return TensorInfo(file, dtype, shape, base + begin, end - begin)
