"""One page of KV as a file: a safetensors file (https://huggingface.co/docs/safetensors) in which
no flipped bit goes unseen.

    u64 header length | JSON header, space padded | token_ids i32 [prefix tokens] | cache 0 [layers,
    *entry] | cache 1 ...

The header's `__metadata__` holds what the page belongs to (layout, namespace, salt, chained key and
its parent's), a CRC-32 per tensor, and the SHA-256 of the header itself with that one value zeroed.
Tensors follow each other without gaps, so every byte of the file is covered. Any safetensors reader
can open it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader, FileIO
from typing import Any

import ml_dtypes
import numpy as np

PageFile = FileIO | BufferedReader
VERSION = "1"
TOKENS = "token_ids"
MAX_HEADER = 1 << 24
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(d): n for n, d in _DTYPES.items()}
_DIGEST = re.compile(rb'"header_sha256":"([0-9a-f]{64})"')
_ZEROS = b'"header_sha256":"' + b"0" * 64 + b'"'


class EntryError(ValueError):
    """A file of the store that must not be used; the message names it."""


class CorruptEntry(EntryError):
    """Truncated, or bytes differ from their checksums."""


class ForeignEntry(EntryError):
    """Intact, but of another model, layout, namespace or prefix."""


@dataclass(frozen=True)
class Page:
    """The KV of one block: `tokens` i32 are all tokens up to its end, the whole prefix; arrays:
    {cache: [layers, *entry]}.

    key: hex, of the page and all before it; parent: the key of the page before, or of the
    namespace.
    """

    key: str
    parent: str
    namespace: str
    salt: str
    tokens: np.ndarray
    arrays: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values()) + self.tokens.nbytes


def root_key(layout: Mapping[str, Any], namespace: str, salt: str) -> str:
    """The parent of first pages: nothing is shared across layouts, namespaces or salts."""
    return hashlib.sha256(
        _canonical(["deepinfer-kv", VERSION, dict(layout), namespace, salt])
    ).hexdigest()


def chain_keys(parent: str, tokens: np.ndarray, block_size: int) -> list[str]:
    """Keys of the whole pages of `tokens`: each is the SHA-256 of its parent's key and its own
    tokens."""
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    step, keys = 4 * block_size, []
    for at in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(bytes.fromhex(parent) + data[at : at + step]).hexdigest()
        keys.append(parent)
    return keys


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def encode(page: Page, layout: Mapping[str, Any]) -> list[bytes | memoryview]:
    """The parts of a page's file, in order."""
    meta = {"format": "deepinfer-kv", "layout": _canonical(layout).decode()}
    meta |= {"key": page.key, "parent": page.parent, "namespace": page.namespace, "salt": page.salt}
    return encode_tensors(
        meta,
        {
            TOKENS: np.asarray(page.tokens, np.int32),
            **{n: page.arrays[n] for n in sorted(page.arrays)},
        },
    )


def encode_tensors(
    meta: Mapping[str, str], tensors: Mapping[str, np.ndarray]
) -> list[bytes | memoryview]:
    """The parts of a self-checking safetensors file, in order."""
    arrays = {n: np.ascontiguousarray(a) for n, a in tensors.items()}
    views = {n: memoryview(np.atleast_1d(a).view(np.uint8).reshape(-1)) for n, a in arrays.items()}
    crcs = {f"crc32:{n}": f"{zlib.crc32(v):08x}" for n, v in views.items()}
    header: dict[str, Any] = {
        "__metadata__": {**meta, "version": VERSION, "header_sha256": "0" * 64, **crcs}
    }
    at = 0
    for name, a in arrays.items():
        header[name] = {
            "dtype": _NAMES[a.dtype],
            "shape": list(a.shape),
            "data_offsets": [at, at + a.nbytes],
        }
        at += a.nbytes
    raw = _canonical(header)
    raw += b" " * (-len(raw) % 64)
    digest = hashlib.sha256(raw).hexdigest().encode()
    raw = raw.replace(_ZEROS, b'"header_sha256":"' + digest + b'"', 1)
    return [struct.pack("<Q", len(raw)), raw, *views.values()]


@dataclass(frozen=True)
class Header:
    """What a file says of itself, its digest checked."""

    meta: dict[str, str]
    tensors: dict[
        str, tuple[np.dtype, tuple[int, ...], int, int]
    ]  # name -> dtype, shape, first and last byte in the data
    data_start: int

    @property
    def layout(self) -> dict[str, Any]:
        """What the file says that engines must have in common; {} where it says nothing."""
        try:
            layout = json.loads(self.meta.get("layout", "{}"))
        except (ValueError, RecursionError):
            return {}
        return layout if isinstance(layout, dict) else {}


def open_page(path: str | os.PathLike[str]) -> PageFile:
    """A file of the store for reading, unbuffered; CorruptEntry where it is no regular file.

    Links are not followed, and nothing that lies there (a FIFO, say) is waited for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptEntry(f"{path}: not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptEntry(f"{path}: not a regular file")
    return os.fdopen(fd, "rb", buffering=0)


def read_header(file: PageFile, name: str) -> Header:
    """Raises CorruptEntry naming the file unless the header is intact and the file is as long as it
    says."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= min(MAX_HEADER, size - 8):
        raise CorruptEntry(
            f"{name}: truncated, or not a page of KV: {size} bytes, header of {length}"
        )
    raw = file.read(length)
    found = _DIGEST.search(raw)
    if (
        found is None
        or hashlib.sha256(raw.replace(found[0], _ZEROS, 1)).hexdigest().encode() != found[1]
    ):
        raise CorruptEntry(f"{name}: the header differs from its checksum")
    try:
        header = json.loads(raw)
        return _checked_header(name, size, 8 + length, header)
    except (ValueError, RecursionError) as error:
        if isinstance(error, EntryError):
            raise
        raise CorruptEntry(f"{name}: the header is not one of a page: {error}") from None


def _checked_header(name: str, size: int, data_start: int, header: Any) -> Header:
    """A header whose every value can be used as it is. Raises ValueError saying what is wrong."""
    meta = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise ValueError("no metadata of texts")
    if meta.get("version") != VERSION:
        raise ForeignEntry(
            f"{name}: format version {meta.get('version')!r}, this code reads {VERSION!r}"
        )
    tensors: dict[str, tuple[np.dtype, tuple[int, ...], int, int]] = {}
    end = 0
    for tensor, entry in header.items():
        tensors[tensor] = _checked_tensor(tensor, entry)
    for tensor, (dtype, shape, start, stop) in sorted(tensors.items(), key=lambda t: t[1][2:]):
        if start != end or stop - start != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{tensor!r} takes bytes {start} to {stop}, after {end}: {shape}")
        end = stop
    if size != data_start + end:
        raise CorruptEntry(f"{name}: {size} bytes, expected {data_start + end}")
    return Header(meta, tensors, data_start)


def _checked_tensor(name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte of one tensor; ValueError unless they are that."""
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in _DTYPES:
        raise ValueError(f"{name!r} has no known dtype")
    shape, offsets = _sizes(name, entry, "shape"), _sizes(name, entry, "data_offsets")
    if len(offsets) != 2:
        raise ValueError(f"{name!r}: two offsets expected, got {offsets!r}")
    return np.dtype(_DTYPES[str(entry["dtype"])]), shape, offsets[0], offsets[1]


def _sizes(name: str, entry: dict[str, Any], field: str) -> tuple[int, ...]:
    values = entry.get(field)
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{name!r}: {field} {values!r} must be sizes")
    return tuple(values)


def read_tensor(
    file: PageFile, name: str, header: Header, tensor: str, out: np.ndarray | None = None
) -> np.ndarray:
    """One tensor, into `out` if given. Raises CorruptEntry, or ForeignEntry when shape or dtype is
    not `out`'s."""
    if tensor not in header.tensors:
        raise ForeignEntry(f"{name}: no tensor {tensor!r}, it has {sorted(header.tensors)}")
    dtype, shape, start, stop = header.tensors[tensor]
    if out is None:
        out = np.empty(shape, dtype)
    elif (out.dtype, out.shape) != (dtype, shape):
        raise ForeignEntry(
            f"{name}: {tensor!r} is {dtype} {shape}, expected {out.dtype} {out.shape}"
        )
    view = memoryview(out.reshape(-1).view(np.uint8))
    file.seek(header.data_start + start)
    if file.readinto(view) != stop - start or f"{zlib.crc32(view):08x}" != header.meta.get(
        f"crc32:{tensor}"
    ):
        raise CorruptEntry(f"{name}: {tensor!r} differs from its checksum")
    return out


def read_page(
    file: PageFile,
    name: str,
    layout: Mapping[str, Any],
    namespace: str,
    salt: str,
    tokens: np.ndarray,
    out: Mapping[str, np.ndarray],
) -> None:
    """Reads a page into `out` ({cache: [layers, *entry]}) if it is exactly the one of `tokens`,
    compared one by one.

    Raises CorruptEntry or ForeignEntry, naming the file and both values; `out` is then undefined.
    """
    header = read_header(file, name)
    own = dict(layout)
    if header.layout != own:
        found = header.layout
        differing = [
            f"{k}: {found.get(k)!r} there, {own.get(k)!r} here"
            for k in {**own, **found}
            if found.get(k) != own.get(k)
        ]
        raise ForeignEntry(f"{name}: another layout: {'; '.join(differing)}")
    if (header.meta.get("namespace"), header.meta.get("salt")) != (namespace, salt):
        raise ForeignEntry(
            f"{name}: of namespace {header.meta.get('namespace')!r}, asked for {namespace!r}, or of"
            " another salt"
        )
    stored = read_tensor(file, name, header, TOKENS)
    if not np.array_equal(stored, tokens):
        raise ForeignEntry(
            f"{name}: holds another prefix ({stored.size} tokens) than asked for ({tokens.size}"
            " tokens)"
        )
    for cache, row in out.items():
        read_tensor(file, name, header, cache, row)


def verify_file(file: PageFile, name: str) -> Header:
    """Checks every byte; raises CorruptEntry or ForeignEntry."""
    header = read_header(file, name)
    for tensor in header.tensors:
        read_tensor(file, name, header, tensor)
    return header
