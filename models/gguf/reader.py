"""A GGUF file's header, read with every length checked against the file, and its tensors as views.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A model split over several files
(NAME-00001-of-0000N.gguf) is read as one.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from deepinfer_jax.model_files import CheckpointError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_STRING = 1 << 26


@dataclass(frozen=True)
class Tensor:
    """shape: as NumPy has it, rows first. data: its bytes, the last dimension in blocks of the
    quantisation."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


class _Header:
    """Takes one value after the other from a mapped file, CheckpointError where it ends."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a readable GGUF file: {what}")

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        if self.at + size > len(self.data):
            raise self.fail(f"it ends within {what}")
        value = struct.unpack_from(code, self.data, self.at)[0]
        self.at += size
        return value

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        if length > min(MAX_STRING, len(self.data) - self.at):
            raise self.fail(f"{what} is said to have {length} bytes")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown type {kind}")
        element, count = self.number("<I", what), self.number("<Q", what)
        if element == _ARRAY:
            raise self.fail(f"{what} is an array of arrays")
        smallest = struct.calcsize(_SCALARS[element]) if element in _SCALARS else 8
        if count * smallest > len(self.data) - self.at:
            raise self.fail(f"{what} is said to have {count} entries")
        if element not in _SCALARS:
            return [self.value(element, what) for _ in range(count)]
        dtype = np.dtype(_SCALARS[element].replace("?", "b1").replace("<b1", "?"))
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * smallest
        return values

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for i in range(count):
            key = self.string(f"the name of metadata {i}")
            if key in values:
                raise self.fail(f"{key} stands there twice")
            values[key] = self.value(self.number("<I", key), key)
        return values

    def tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, type, offset) of each tensor."""
        for i in range(count):
            name = self.string(f"the name of tensor {i}")
            dims = self.number("<I", name)
            if not 1 <= dims <= 4:
                raise self.fail(f"tensor {name} has {dims} dimensions")
            shape = tuple(self.number("<Q", name) for _ in range(dims))
            yield name, shape[::-1], self.number("<I", name), self.number("<Q", name)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors) of one file. Raises CheckpointError naming the file and what in it."""
    try:
        with path.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    header = _Header(path, data)
    if data[:4] != b"GGUF":
        raise header.fail(f"it begins with {data[:4]!r}")
    header.at = 4
    version = header.number("<I", "the version")
    if version not in (2, 3):
        raise header.fail(f"version {version} is not supported; supported: 2 and 3, little endian")
    tensors, values = (header.number("<Q", "the counts") for _ in range(2))
    if (tensors + values) * 12 > len(data):
        raise header.fail(f"it is said to have {tensors} tensors and {values} values")
    metadata = header.metadata(values)
    infos = list(header.tensors(tensors))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise header.fail(f"general.alignment is {alignment!r}")
    start = -(-header.at // alignment) * alignment
    found: dict[str, Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in found:
            raise header.fail(f"tensor {name} stands there twice")
        found[name] = _tensor(header, name, shape, kind, start + offset)
    return metadata, found


def _tensor(header: _Header, name: str, shape: tuple[int, ...], code: int, begin: int) -> Tensor:
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as error:
        raise header.fail(f"tensor {name} has the unknown type {code}") from error
    block, width = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise header.fail(f"tensor {name} {shape} is not made of blocks of {block} ({kind.name})")
    size = math.prod(shape) // block * width
    if begin + size > len(header.data):
        raise header.fail(f"tensor {name} {shape} ends behind the file: it is truncated")
    stored = (*shape[:-1], shape[-1] // block * width)
    view = np.frombuffer(header.data, np.uint8, size, begin).reshape(stored)
    return Tensor(name, kind, shape, view)


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` is a file of: itself, or all parts of a split one, in
    order. Raises CheckpointError naming missing parts."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    name, _, count = match.groups()
    if not 1 <= int(count) <= 10_000:
        return [path]
    parts = [path.with_name(f"{name}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(f"{path} is part of a split model that lacks {', '.join(missing)}")
    return parts


class GGUFFile:
    """Metadata and tensors of a model, of all its parts. CheckpointError when it is damaged.

    Metadata is asked for with the kind it must have; `{arch}` in a key stands for the architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        parts = parts_of(path)
        for number, part in enumerate(parts):
            metadata, tensors = read_file(part)
            count, index = metadata.get("split.count", 1), metadata.get("split.no", 0)
            if count != len(parts) or (len(parts) > 1 and index != number):
                raise CheckpointError(
                    f"{part}: split.no {index} of split.count {count}, but its name says part"
                    f" {number + 1} of {len(parts)} (NAME-00001-of-0000N.gguf)"
                )
            if both := sorted(tensors.keys() & self.tensors.keys()):
                raise CheckpointError(f"{part}: tensor {both[0]} stands in two parts")
            self.metadata = metadata if number == 0 else self.metadata
            self.tensors |= tensors
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(parts) > 1 and total != len(self.tensors):
            raise CheckpointError(
                f"{path}: split.tensors.count is {total}, its parts have {len(self.tensors)}"
            )
        self.arch = self.text("general.architecture", "")

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.key(key)}: {what}")

    def key(self, key: str) -> str:
        return key.replace("{arch}", getattr(self, "arch", ""))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self.key(key), default)

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"must be text, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number >= 0; a list of the same number for every layer counts as that number."""
        value = self._one(key, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise self.fail(key, f"must be a whole number in [0, 2**31), got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as short as its float32 allows: 9.999999747378752e-06 was 1e-05."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"must be a number, got {value!r}")
        if not math.isfinite(value):
            raise self.fail(key, f"must be finite, got {value!r}")
        return float(str(np.float32(value)))

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(key, "must be a list of texts")
        return value

    def _one(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is None:
            raise CheckpointError(f"{self.path} lacks {self.key(key)}")
        if isinstance(value, list):
            raise self.fail(key, "differs between layers, which is not supported")
        return value
