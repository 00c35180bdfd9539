"""Host memory in front of the KV store: the tiers below the device's own prefix cache, with
counters for each."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.kv.store import KVStore
from deepinfer_jax.kv.store_format import Page

READERS = 4
"""Files read and checked at a time (reading and CRC-32 let other threads run)."""


@dataclass(frozen=True)
class Prefix:
    """Pages first, first + 1, ... of a sequence: their keys, and tokens i32 of everything up to the
    last one's end."""

    namespace: str
    salt: str
    root: str
    keys: list[str]
    tokens: np.ndarray
    first: int
    block_size: int

    def tokens_to(self, page: int) -> np.ndarray:
        """All tokens up to the end of a page."""
        return self.tokens[: (page + 1) * self.block_size]


@dataclass(frozen=True)
class Loaded:
    """The first `count` pages asked for: {cache: [count, layers, *entry]}."""

    count: int
    arrays: dict[str, np.ndarray]


class HostTier:
    """Pages in host memory, least recently used ones going first. dirty: not on disk yet."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._pages: OrderedDict[str, tuple[Page, bool]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def get(self, key: str, tokens: np.ndarray) -> Page | None:
        with self._lock:
            found = self._pages.get(key)
            if found is None or not np.array_equal(found[0].tokens, tokens):
                return None
            self._pages.move_to_end(key)
            return found[0]

    def put(self, page: Page, dirty: bool) -> list[Page]:
        """Keeps a page; returns dirty ones that had to go and must be written now."""
        with self._lock:
            old = self._pages.pop(page.key, None)
            if old is not None:
                self.nbytes -= old[0].nbytes
                dirty = dirty or old[1]
            if page.nbytes > self.max_bytes:
                return [page] if dirty else []
            self._pages[page.key] = page, dirty
            self.nbytes += page.nbytes
            gone = []
            while self.nbytes > self.max_bytes:
                _, (evicted, was_dirty) = self._pages.popitem(last=False)
                self.nbytes -= evicted.nbytes
                if was_dirty:
                    gone.append(evicted)
            return gone

    def take_dirty(self) -> list[Page]:
        """Pages to be written; they stay, as clean ones."""
        with self._lock:
            dirty = [page for page, is_dirty in self._pages.values() if is_dirty]
            for page in dirty:
                self._pages[page.key] = page, False
            return dirty


class TieredStore:
    """Host memory, then disk; either may be missing. write_back: a page reaches the disk when host
    memory lets go of it, or with flush(); otherwise at once."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], Any]],
        disk: KVStore | None,
        host_bytes: int = 0,
        write_back: bool = False,
    ):
        """shapes: {cache: (shape of one page [layers, *entry], dtype)}."""
        self.shapes, self.disk, self.write_back = dict(shapes), disk, write_back
        self.host = HostTier(host_bytes) if host_bytes else None
        self.counters: Counter[str] = Counter()
        self._readers = ThreadPoolExecutor(READERS, "kv-read")

    def has(self, key: str, namespace: str) -> bool:
        return (self.host is not None and key in self.host) or (
            self.disk is not None and self.disk.has(key, namespace)
        )

    def load(self, prefix: Prefix) -> Loaded:
        """The longest run of pages from the first one on that some tier holds; reads in
        parallel."""
        keys = prefix.keys
        count = next(
            (i for i, key in enumerate(keys) if not self.has(key, prefix.namespace)), len(keys)
        )
        arrays = {n: np.empty((count, *shape), dtype) for n, (shape, dtype) in self.shapes.items()}
        tiers = (
            list(self._readers.map(lambda i: self._load_page(prefix, i, arrays), range(count)))
            if count
            else []
        )
        good = tiers.index(None) if None in tiers else count
        for tier in tiers[:good]:
            self.counters[f"{tier}_hits"] += 1
        self.counters["misses"] += len(keys) - good
        if self.disk is not None and good:
            self.disk.touch(keys[:good], prefix.namespace)
        if self.host is not None:
            self._promote(prefix, arrays, [i for i in range(good) if tiers[i] == "disk"])
        return Loaded(good, {n: a[:good] for n, a in arrays.items()})

    def _load_page(self, prefix: Prefix, i: int, arrays: dict[str, np.ndarray]) -> str | None:
        key, tokens = prefix.keys[i], prefix.tokens_to(prefix.first + i)
        page = None if self.host is None else self.host.get(key, tokens)
        if page is not None:
            for name, array in arrays.items():
                array[i] = page.arrays[name]
            return "host"
        rows = {name: array[i] for name, array in arrays.items()}
        if self.disk is not None and self.disk.read(
            key, prefix.namespace, prefix.salt, tokens, rows
        ):
            return "disk"
        return None

    def _promote(self, prefix: Prefix, arrays: dict[str, np.ndarray], pages: list[int]) -> None:
        for i in pages:
            self._keep(
                self._page(prefix, i, {n: a[i].copy() for n, a in arrays.items()}), dirty=False
            )

    def _page(self, prefix: Prefix, i: int, arrays: Mapping[str, np.ndarray]) -> Page:
        parent = prefix.keys[i - 1] if i else prefix.root
        return Page(
            prefix.keys[i],
            parent,
            prefix.namespace,
            prefix.salt,
            prefix.tokens_to(prefix.first + i),
            arrays,
        )

    def _keep(self, page: Page, dirty: bool) -> None:
        assert self.host is not None  # the callers ask
        gone = self.host.put(page, dirty)
        if gone and self.disk is not None:
            self.counters["written_back"] += self.disk.write(gone)

    def save(self, prefix: Prefix, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps pages; arrays {cache: [len(keys), layers, *entry]}. prefix.root: key of the page
        before the first."""
        take = (
            np.copy if self.host is not None else np.asarray
        )  # host memory keeps pages one by one, not the whole batch alive
        pages = [
            self._page(prefix, i, {n: take(a[i]) for n, a in arrays.items()})
            for i in range(len(prefix.keys))
        ]
        self.counters["saved"] += len(pages)
        back = self.write_back and self.host is not None and self.disk is not None
        if self.host is not None:
            for page in pages:
                self._keep(page, dirty=back)
        if self.disk is not None and not back:
            self.disk.write(pages)

    def flush(self) -> None:
        """Writes what is in host memory only."""
        if self.host is not None and self.disk is not None:
            self.counters["written_back"] += self.disk.write(self.host.take_dirty())

    def close(self) -> None:
        self.flush()
        self._readers.shutdown()

    def stats(self) -> dict[str, Any]:
        out: dict[str, Any] = dict(self.counters)
        if self.host is not None:
            out |= {"host_pages": len(self.host), "host_bytes": self.host.nbytes}
        return out | (
            {} if self.disk is None else {f"disk_{k}": v for k, v in self.disk.stats().items()}
        )
