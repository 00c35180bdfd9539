"""Snapshots on disk: an Orbax CheckpointManager folder with one step per snapshot, the two newest
kept.

    folder / 7 / {meta, arrays}                          a snapshot: requests as JSON, {blocks |
    states: {cache: array}}
    folder / 8 / meta                                    one of a job of several processes: names
    its parts
           / parts / KEY / {0, 1, ...}.safetensors       what each process has, self-checking as the
           KV store's pages are

(Orbax writes NumPy arrays in process 0 only.) A snapshot appears by Orbax's rename when it is
complete; of several processes the first one's, once all parts are there. A crash at any moment
leaves the earlier ones. Everything carries a CRC-32.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from deepinfer_jax.engine.request_state import plain
from deepinfer_jax.kv import store as kv_store
from deepinfer_jax.kv import store_format as kv_store_format
from deepinfer_jax.kv.block_layout import KINDS
from deepinfer_jax.snapshot import records
from deepinfer_jax.snapshot.records import VERSION, SnapshotMismatch, SnapshotRecord

KEPT = 2
PARTS = "parts"
STALE_SECONDS = 3600.0
"""Age at which parts that no snapshot names are those of a job that has died."""
JOB_TIMEOUT = 600.0
"""Seconds that a job's processes wait for each other's parts."""
POLL = 0.02


class SnapshotError(ValueError):
    """A snapshot is missing or damaged; the message names its folder and what is wrong."""


@dataclass
class Snapshot:
    """arrays: {"blocks" | "states": {cache: [rows, layers, *entry]}}, whole entries
    whatever tp is."""

    record: SnapshotRecord
    arrays: dict[str, dict[str, np.ndarray]]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for caches in self.arrays.values() for a in caches.values())


@dataclass(frozen=True)
class Share:
    """Which part of a job's snapshot a process writes. key: the same in all of them, another for
    each snapshot."""

    key: int
    process: int
    processes: int


class ArrayRecord(msgspec.Struct, frozen=True):
    """What one cache's array is; crc32 of its bytes."""

    shape: list[int]
    dtype: str
    crc32: int

    @classmethod
    def of(cls, array: np.ndarray) -> ArrayRecord:
        return cls(list(array.shape), array.dtype.name, checksum(array))


class JobParts(msgspec.Struct):
    """Where the parts of a job's snapshot are: folder / PARTS / key / {0 .. processes - 1}."""

    key: str
    processes: int


class Contents(msgspec.Struct, kw_only=True):
    """The JSON of one snapshot, or of one process's part: either `record` or `job`."""

    version: int = VERSION
    record: SnapshotRecord | None = None
    job: JobParts | None = None
    arrays: dict[str, dict[str, ArrayRecord]] = {}

    def encode(self) -> str:
        return json.dumps(msgspec.to_builtins(self, enc_hook=plain))

    @classmethod
    def decode(cls, text: str | bytes) -> Contents:
        """Raises OtherVersion; msgspec.ValidationError naming the field that is wrong."""
        values = json.loads(text)
        found = values.get("version")
        if found != VERSION:
            raise OtherVersion(found)
        return msgspec.convert(values, cls, str_keys=True)


class OtherVersion(Exception):
    """Records of another version of this format."""


# ---- out -----------------------------------------------------------------------------------------


def write(snapshot: Snapshot, folder: Path) -> int:
    """Writes one step of the folder's CheckpointManager; returns its number. Complete
    or not there."""
    arrays = {kind: dict(caches) for kind, caches in snapshot.arrays.items()}
    described = {k: {n: ArrayRecord.of(a) for n, a in c.items()} for k, c in arrays.items()}
    return _write_step(folder, Contents(record=snapshot.record, arrays=described), arrays)


def _write_step(folder: Path, contents: Contents, arrays: dict[str, dict[str, np.ndarray]]) -> int:
    import orbax.checkpoint as ocp  # takes seconds to import: only who snapshots pays

    text = contents.encode()
    with _manager(
        folder, max_to_keep=KEPT, cleanup_tmp_directories=True
    ) as manager:  # of writers that died
        step = (manager.latest_step() or 0) + 1
        items = {"meta": ocp.args.JsonSave({"text": text, "crc32": zlib.crc32(text.encode())})}
        if arrays:
            items["arrays"] = ocp.args.PyTreeSave(arrays)
        manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    return step


def write_share(
    snapshot: Snapshot, folder: Path, share: Share, timeout: float = JOB_TIMEOUT
) -> int:
    """Writes this process's part and waits until the snapshot is complete; its number. TimeoutError
    when a process does not come."""
    parts = folder / PARTS / str(share.key)
    _write_part(snapshot, _part(parts, share.process))
    if share.process:
        _wait_for(
            lambda: (parts / "number").exists(),
            timeout,
            f"{folder}: process 0 has not completed the snapshot",
        )
        return int((parts / "number").read_text())
    for i in range(share.processes):
        _wait_for(
            _part(parts, i).exists, timeout, f"{folder}: process {i} has not written its part"
        )
    number = _write_step(folder, Contents(job=JobParts(str(share.key), share.processes)), {})
    _replace(parts / "number", [str(number).encode()])
    _remove_unused_parts(folder)
    return number


def _part(parts: Path, process: int) -> Path:
    return parts / f"{process}.safetensors"


def _write_part(snapshot: Snapshot, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = Contents(record=snapshot.record).encode()
    tensors = {"meta": np.frombuffer(text.encode(), np.uint8)}
    tensors |= {
        f"{kind}/{name}": a
        for kind, caches in snapshot.arrays.items()
        for name, a in caches.items()
    }
    _replace(path, kv_store_format.encode_tensors({"format": "deepinfer-snapshot"}, tensors))


def _replace(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    temp.unlink(missing_ok=True)
    kv_store.write_parts(temp, parts)
    kv_store.fsync(temp)
    os.replace(temp, path)
    kv_store.fsync(path.parent)


def _wait_for(there: Callable[[], bool], timeout: float, problem: str) -> None:
    limit = time.monotonic() + timeout
    while not there():
        if time.monotonic() > limit:
            raise TimeoutError(f"{problem} within {timeout:g} s")
        time.sleep(POLL)


def _remove_unused_parts(folder: Path) -> None:
    """Parts of snapshots that are not kept any more, and of those that were never completed."""
    with _manager(folder, read_only=True) as manager:
        contents = [_read_contents(manager, folder, step) for step in manager.all_steps()]
    used = {c.job.key for c in contents if c.job is not None}
    for parts in (folder / PARTS).iterdir():
        with contextlib.suppress(FileNotFoundError):
            complete = (parts / "number").exists()
            if parts.name not in used and (
                complete or time.time() - parts.stat().st_mtime > STALE_SECONDS
            ):
                shutil.rmtree(parts)


# ---- back ----------------------------------------------------------------------------------------


def load(
    folder: str | Path,
    step: int | None = None,
    select: Callable[[SnapshotRecord], SnapshotRecord] = lambda record: record,
) -> Snapshot:
    """The newest complete snapshot of a folder, or number `step`. Raises SnapshotError if there is
    none or it is damaged, SnapshotMismatch if it is of another format version.

    select(record) leaves in the record what is wanted; rows of `arrays` that it does not refer to
    may be undefined.
    """
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise SnapshotError(f"{folder}: no such folder of snapshots")
    with _manager(folder, read_only=True) as manager:
        step = manager.latest_step() if step is None else step
        if step is None or step not in manager.all_steps():
            raise SnapshotError(
                f"{folder}: no complete snapshot{'' if step is None else f' {step}'}; there are"
                f" {manager.all_steps()}"
            )
        contents = _read_contents(manager, folder, step)
        if contents.record is not None:
            record = select(contents.record)
            return Snapshot(record, _read_arrays(manager, folder, step, contents.arrays))
    parts = folder / PARTS / contents.job.key
    return _load_parts([_part(parts, i) for i in range(contents.job.processes)], select)


def _load_parts(paths: list[Path], select: Callable[[SnapshotRecord], SnapshotRecord]) -> Snapshot:
    """Reads the arrays of those parts only that the selected requests refer to."""
    with contextlib.ExitStack() as stack:
        files, headers, parts = [], [], []
        for path in paths:
            with _damage_named(str(path)):
                files.append(stack.enter_context(open(path, "rb", buffering=0)))
                headers.append(kv_store_format.read_header(files[-1], str(path)))
                meta = kv_store_format.read_tensor(files[-1], str(path), headers[-1], "meta")
                parts.append(Contents.decode(meta.tobytes()).record)
        counts = [{kind: _rows(h, kind) for kind in KINDS} for h in headers]
        record = select(records.merge(parts, counts))
        used, at = record.used_rows(), dict.fromkeys(KINDS, 0)
        arrays = _empty(headers, {kind: sum(c[kind] for c in counts) for kind in KINDS})
        for path, file, header, count in zip(paths, files, headers, counts, strict=True):
            if any(
                ((rows >= at[kind]) & (rows < at[kind] + count[kind])).any()
                for kind, rows in used.items()
            ):
                for kind, name in [(k, n) for k in arrays if count[k] for n in arrays[k]]:
                    rows = arrays[kind][name][at[kind] : at[kind] + count[kind]]
                    with _damage_named(str(path)):
                        kv_store_format.read_tensor(file, str(path), header, f"{kind}/{name}", rows)
            at = {kind: at[kind] + count[kind] for kind in at}
    return Snapshot(record, arrays)


def _rows(header: kv_store_format.Header, kind: str) -> int:
    return next(
        (
            shape[0]
            for name, (_, shape, *_) in header.tensors.items()
            if name.startswith(f"{kind}/")
        ),
        0,
    )


def _empty(
    headers: list[kv_store_format.Header], totals: Mapping[str, int]
) -> dict[str, dict[str, np.ndarray]]:
    """Arrays for all parts' rows; memory that is not written costs nothing."""
    out: dict[str, dict[str, np.ndarray]] = {}
    for header in headers:
        for tensor, (dtype, shape, *_) in header.tensors.items():
            kind, _, name = tensor.partition("/")
            if name and name not in out.setdefault(kind, {}):
                out[kind][name] = np.empty((totals[kind], *shape[1:]), dtype)
    return out


def _read_contents(manager: Any, folder: Path, step: int) -> Contents:
    import orbax.checkpoint as ocp

    with _damage_named(f"{folder}: snapshot {step}"):
        saved = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if zlib.crc32(saved["text"].encode()) != saved["crc32"]:
            raise ValueError("checksum of the requests differs")
        return Contents.decode(saved["text"])


def _read_arrays(
    manager: Any, folder: Path, step: int, described: Mapping[str, Mapping[str, ArrayRecord]]
) -> dict[str, dict[str, np.ndarray]]:
    import orbax.checkpoint as ocp

    if not described:
        return {}
    with _damage_named(f"{folder}: snapshot {step}"):
        as_numpy = {
            k: {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in c}
            for k, c in described.items()
        }
        restore = ocp.args.PyTreeRestore(item=as_numpy, restore_args=as_numpy)
        arrays = manager.restore(step, args=ocp.args.Composite(arrays=restore))["arrays"]
        for kind, caches in arrays.items():
            for name, array in caches.items():
                found = ArrayRecord.of(array)
                if found != described[kind][name]:
                    raise ValueError(f"{kind}/{name} is {found}, it was {described[kind][name]}")
    return arrays


@contextlib.contextmanager
def _damage_named(what: str) -> Iterator[None]:
    try:
        yield
    except OtherVersion as found:
        raise SnapshotMismatch(
            f"{what}: its format version is {found}, this code reads version {VERSION}"
        ) from None
    except Exception as error:  # tensorstore, zstd, JSON: each has exceptions of its own
        raise SnapshotError(f"{what} is damaged: {type(error).__name__}: {error}") from error


def _manager(folder: Path, **options: Any) -> Any:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    if not options.get("read_only"):
        folder.mkdir(parents=True, exist_ok=True)
    process, alone = jax.process_index(), {}
    # a folder is one process's affair: Orbax must neither wait for the others nor leave it to the
    # first
    if jax.process_count() > 1:
        alone["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
            process, {process}, f"process{process}"
        )
    handlers = {
        "meta": ocp.JsonCheckpointHandler(**alone),
        "arrays": ocp.PyTreeCheckpointHandler(
            use_compression=False, **alone
        ),  # zstd takes 8 % off KV, and cores from the steps
    }
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, create=False, **options, **alone
    )
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8))
