"""KVStore: computed prefixes in a folder, one file per block, shared by any number of processes of
one file system.

    folder / layout id / namespace / first 2 digits of the key / key.kv

A page is found by its chained key and used only if the token ids stored in it are the ones asked
for, layout and checksums agree. Files appear by rename, so a reader sees all of one or nothing,
whatever dies when; two writers of a page write the same bytes. No error of the file system reaches
a request: the store then serves nothing for a while, says so once, and counts.

Imports no JAX. See tiers.py for host memory in front of it and engine/prefix_store.py for the
engine's side.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import stat
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.kv.store_format import (
    EntryError,
    ForeignEntry,
    Page,
    encode,
    open_page,
    read_page,
)

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
STALE_TEMP_SECONDS = 3600.0
GC_TARGET = 0.9
"""Share of the cap that is left after a collection, so that not every write collects."""
_serial = itertools.count()


def layout_id(layout: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(layout), sort_keys=True).encode()).hexdigest()[:16]


def namespace_folder(namespace: str) -> str:
    """A folder name that no other namespace has."""
    quoted = urllib.parse.quote(namespace, safe="", errors="surrogatepass").replace(".", "%2E")
    if not quoted:
        return "shared"
    return (
        f"ns-{quoted}"
        if len(quoted) <= 100
        else f"nh-{hashlib.sha256(namespace.encode(errors='surrogatepass')).hexdigest()}"
    )


@dataclass(frozen=True)
class Entry:
    """A file of a store. used: seconds of time.time() when it was last written or read by a
    request."""

    path: Path
    nbytes: int
    used: float


class KVStore:
    """Thread-safe. layout: what two engines must have in common to exchange KV, as plain JSON
    values.

    max_bytes caps the whole folder, all layouts and namespaces together. fsync: pages survive a
    crash of the machine, not only of the process. retry_seconds: how long the store is left alone
    after the file system has failed.
    """

    def __init__(
        self,
        folder: str | Path,
        layout: Mapping[str, Any],
        *,
        max_bytes: int | None = None,
        fsync: bool = True,
        retry_seconds: float = 60.0,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"kv_store_bytes must be >= 1, got {max_bytes}")
        self.folder, self.layout, self.max_bytes = (
            Path(folder),
            json.loads(json.dumps(dict(layout))),
            max_bytes,
        )
        self.fsync, self.retry_seconds = fsync, retry_seconds
        self.root = self.folder / layout_id(self.layout)
        _warn_if_others_write(self.folder)
        self.counters: Counter[str] = Counter()
        self._disabled_until = 0.0
        self._warned = False
        self._bad: set[Path] = set()  # unusable files found: to be replaced by the next save
        self._size: int | None = None
        self._lock = threading.Lock()

    @property
    def disabled(self) -> bool:
        """The file system has failed a moment ago."""
        return time.monotonic() < self._disabled_until

    def path(self, key: str, namespace: str) -> Path:
        return self.root / namespace_folder(namespace) / key[:2] / f"{key}{SUFFIX}"

    # ---- reading ---------------------------------------------------------------------------------

    def has(self, key: str, namespace: str) -> bool:
        """There is a file that is not known to be bad."""
        path = self.path(key, namespace)
        return not self.disabled and path not in self._bad and _is_file(path)

    def read(
        self, key: str, namespace: str, salt: str, tokens: np.ndarray, out: Mapping[str, np.ndarray]
    ) -> bool:
        """Reads the page of `tokens` (the whole prefix) into `out`; False if there is none that may
        be used."""
        path = self.path(key, namespace)
        if self.disabled or path in self._bad:
            return False
        try:
            with open_page(path) as file:
                read_page(file, str(path), self.layout, namespace, salt, tokens, out)
        except FileNotFoundError:
            return False
        except EntryError as error:
            self.counters["foreign" if isinstance(error, ForeignEntry) else "corrupt"] += 1
            logger.warning("KV store: skipped, to be computed again: %s", error)
            self._bad.add(path)
            return False
        except OSError as error:
            self._failed("reading", error)
            return False
        return True

    def touch(self, keys: Iterable[str], namespace: str) -> None:
        """These pages were of use just now. Later pages are the first to be collected."""
        now = time.time_ns()
        for i, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self.path(key, namespace), ns=(now - 1000 * i, now - 1000 * i))

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, pages: Iterable[Page]) -> int:
        """Writes those that are not there yet; how many are there now. Never raises for what the
        file system does."""
        if self.disabled:
            return 0
        stored, added, temps = 0, 0, []
        try:
            for page in pages:
                path = self.path(page.key, page.namespace)
                if path not in self._bad and _is_file(path):
                    stored += 1
                elif self.max_bytes is None or page.nbytes < self.max_bytes:
                    temps.append((self._write_temp(path, page), path))
                    added += temps[-1][0].stat().st_size
            self._publish(temps)
        except OSError as error:
            for temp, _ in temps:
                with contextlib.suppress(OSError):
                    temp.unlink()
            self._failed("writing", error)
            return stored
        self.counters["written"] += len(temps)
        try:
            self._collect_if_full(added)
        except OSError as error:
            self._failed("collecting", error)
        return stored + len(temps)

    def _write_temp(self, path: Path, page: Page) -> Path:
        make_private(path.parent)
        temp = path.with_name(
            f".{path.name}.{os.uname().nodename}.{os.getpid()}.{next(_serial)}.tmp"
        )
        write_parts(temp, encode(page, self.layout))
        return temp

    def _publish(self, temps: list[tuple[Path, Path]]) -> None:
        """Temporary files become pages; contents reach the disk before names do."""
        now = time.time_ns()
        for i, (temp, _) in enumerate(temps):
            os.utime(
                temp, ns=(now - 1000 * i, now - 1000 * i)
            )  # as in touch(): later pages are collected first
        if self.fsync:
            for temp, _ in temps:
                fsync(temp)
        for temp, path in temps:
            if path.is_dir() and not path.is_symlink():  # a file cannot replace it
                path.rename(path.with_name(f".{path.name}.{next(_serial)}.tmp"))
            os.replace(temp, path)
            self._bad.discard(path)
        if self.fsync:
            for parent in {path.parent for _, path in temps}:
                fsync(parent)

    def _failed(self, doing: str, error: OSError) -> None:
        self.counters["errors"] += 1
        self._disabled_until = time.monotonic() + self.retry_seconds
        if not self._warned:
            self._warned = True
            logger.warning(
                "KV store %s: %s failed (%s); requests go on without it, tried again every %g s",
                self.folder,
                doing,
                error,
                self.retry_seconds,
            )

    # ---- size ------------------------------------------------------------------------------------

    def _collect_if_full(self, added: int) -> None:
        if self.max_bytes is None:
            return
        with self._lock:
            if self._size is None:
                self._size = sum(e.nbytes for e in entries(self.folder))
            else:
                self._size += added
            if self._size > self.max_bytes:
                removed, _, left = collect(self.folder, int(self.max_bytes * GC_TARGET))
                self._size = left
                self.counters["evicted"] += removed

    def stats(self) -> dict[str, Any]:
        return dict(self.counters) | {"disabled": self.disabled}


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a new file for its owner alone; nothing of it is left when that fails (OSError)."""
    try:
        with open(path, "xb", buffering=0, opener=_private) as file:
            for part in parts:
                view = memoryview(part)
                while len(view):  # a raw write may stop early
                    view = view[file.write(view) :]
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def make_private(folder: Path) -> None:
    """Creates a folder and what is missing above it for their owner alone: pages hold prompts."""
    for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _warn_if_others_write(folder: Path) -> None:
    with contextlib.suppress(OSError):
        found = folder.stat()
        if found.st_mode & 0o022 or found.st_uid not in (0, os.geteuid()):
            logger.warning(
                "KV store %s: other users can write it (owner %d, mode %o): whoever does decides"
                " what is computed from its pages",
                folder,
                found.st_uid,
                found.st_mode & 0o777,
            )


def _is_file(path: Path) -> bool:
    """A regular file lies there itself, not behind a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- the folder as a whole -----------------------------------------------------------------------


def entries(folder: str | Path) -> Iterator[Entry]:
    """All pages, in no order; files that vanish meanwhile are left out."""
    for path in Path(folder).glob(f"*/*/*/*{SUFFIX}"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                yield Entry(path, found.st_size, found.st_mtime)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def collect(
    folder: str | Path, max_bytes: int, *, stale_temps: float = STALE_TEMP_SECONDS
) -> tuple[int, int, int]:
    """Removes least recently used pages until at most max_bytes are left, and temporary files of
    dead writers.

    (pages removed, bytes removed, bytes left). One process collects at a time; if another one does,
    nothing is done here. A reader that has opened a file goes on reading it; one that comes too
    late computes.
    """
    folder = Path(folder)
    with open(folder / ".gc.lock", "a", opener=_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0, 0, sum(e.nbytes for e in entries(folder))
        found = sorted(entries(folder), key=lambda e: e.used)
        left, removed, freed = sum(e.nbytes for e in found), 0, 0
        for entry in found:
            if left <= max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                entry.path.unlink()
            left, removed, freed = left - entry.nbytes, removed + 1, freed + entry.nbytes
        for temp in folder.glob("*/*/*/.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - temp.lstat().st_mtime > stale_temps:
                    _remove(temp)
    return removed, freed, left
