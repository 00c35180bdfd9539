"""Owner of the KV blocks of one rank: free list, reference counts, prefix reuse.

A block is free, used (reference count > 0) or cached (reference count 0, content still addressable
by the prefix cache); free + cached + used == total always. Allocation takes free blocks first, then
evicts the least recently used cached ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

HashFn = Callable[[Hashable, bytes], Hashable]


@dataclass(frozen=True)
class CachedPage:
    """A block that the prefix cache can find. parent: node of the page before, or the cache salt of
    a first page."""

    block: int
    parent: int | str
    content: bytes
    node: int


class BlockManager:
    """Reference-counted blocks with prefix reuse.

    A cached block is known by (its predecessor's content, its own content). Predecessors are
    compared by node number, which is unique per content and never reused, and contents byte by
    byte: a hash collision can cost a hit, never mix two prefixes. hash_fn(parent, content) only
    picks the bucket.
    """

    def __init__(self, num_blocks: int, hash_fn: HashFn | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._free = np.arange(
            num_blocks - 1, -1, -1, dtype=np.int32
        )  # a stack: block 0 is taken first
        self._num_free = num_blocks
        self._hash_fn: HashFn = hash_fn or (lambda parent, content: hash((parent, content)))
        self._buckets: dict[Hashable, int] = {}  # hash -> block
        self._entries: dict[
            int, tuple[Hashable, int | str, bytes, int]
        ] = {}  # block -> (hash, parent node, content, node)
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # cached blocks, least recently used first
        # not 0: hash(0) == hash(""), so page 1 of a repetitive prompt would share page 0's bucket
        self._next_node = 1
        self.before_overwriting: list[Callable[[np.ndarray], None]] = []
        """Called with blocks whose contents are about to be lost, before anything is enqueued that
        writes them."""

    # ---- counts

    @property
    def num_free(self) -> int:
        """Blocks an allocation may take: free ones and cached ones nobody uses."""
        return self._num_free + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def usage(self) -> float:
        return self.num_used / self.num_blocks

    # ---- allocation

    def allocate(self, count: int) -> np.ndarray:
        """i32 [count] blocks with reference count 1. Raises ValueError when fewer are free."""
        if count > self.num_free:
            raise ValueError(
                f"cannot allocate {count} blocks: {self.num_free} of {self.num_blocks} are free"
            )
        while self._num_free < count:
            self._evict_one()
        start = self._num_free - count
        blocks = self._free[start : self._num_free][::-1].copy()
        self._num_free = start
        self.ref_counts[blocks] = 1
        for call in self.before_overwriting:
            call(blocks)
        return blocks

    def pin(self, blocks: np.ndarray) -> None:
        """One more holder for each of these blocks (used or cached ones; no duplicates)."""
        if not len(blocks):
            return
        idle = blocks[self.ref_counts[blocks] == 0]
        for block in idle.tolist():
            if block not in self._evictable:
                raise ValueError(f"cannot pin block {block}: it is free")
            del self._evictable[block]
        self.ref_counts[blocks] += 1

    def unpin(self, blocks: np.ndarray) -> None:
        """One holder less. Blocks nobody holds any more become free, or stay cached with the last
        page evicted first."""
        if not len(blocks):
            return
        counts = self.ref_counts[blocks] - 1
        if counts.min() < 0:
            bad = blocks[counts < 0].tolist()
            raise ValueError(f"blocks {bad} are released more often than they were taken")
        self.ref_counts[blocks] = counts
        idle = blocks[counts == 0]
        if self._entries:
            idle = self._keep_cached(idle)
        self._free[self._num_free : self._num_free + idle.size] = idle[::-1]
        self._num_free += idle.size

    def _keep_cached(self, idle: np.ndarray) -> np.ndarray:
        plain = []
        for block in reversed(
            idle.tolist()
        ):  # later pages are less likely to be shared: evict them first
            if block in self._entries:
                self._evictable[block] = None
            else:
                plain.append(block)
        return np.array(plain[::-1], np.int32)

    def _evict_one(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        key, *_ = self._entries.pop(block)
        del self._buckets[key]
        self._free[self._num_free] = block
        self._num_free += 1

    # ---- prefix cache

    def lookup(self, parent: int | str, content: bytes) -> tuple[int, int] | None:
        """(block, node) that holds exactly `content` after exactly the prefix `parent`, or None."""
        block = self._buckets.get(self._hash_fn(parent, content))
        if block is None:
            return None
        _, own_parent, own_content, node = self._entries[block]
        if own_parent != parent or own_content != content:
            return None
        return block, node

    def register(self, block: int, parent: int | str, content: bytes) -> int | None:
        """Makes a used block, whose KV is computed, findable. Returns the node of this content: an
        earlier block's if that one is cached already; None when another content occupies the hash
        (then this block and its successors stay unknown)."""
        if self.ref_counts[block] < 1:
            raise ValueError(f"cannot cache block {block}: nobody holds it")
        known = self.lookup(parent, content)
        if known is not None:
            return known[1]
        key = self._hash_fn(parent, content)
        if key in self._buckets or block in self._entries:
            return None
        node = self._next_node
        self._next_node += 1
        self._buckets[key] = block
        self._entries[block] = (key, parent, content, node)
        return node

    def cached_pages(self) -> list[CachedPage]:
        """Every page that lookup() can find, the least recently used ones first, those in use
        last."""
        in_use = sorted(block for block in self._entries if block not in self._evictable)
        return [self._cached_page(b) for b in (*self._evictable, *in_use)]

    def _cached_page(self, block: int) -> CachedPage:
        _, parent, content, node = self._entries[block]
        return CachedPage(block, parent, content, node)

    def uncache(self, block: int) -> None:
        """The prefix cache forgets a used block, because its holder is about to overwrite part of
        it."""
        for call in self.before_overwriting:
            call(np.array([block], np.int32))
        entry = self._entries.pop(block, None)
        if entry is not None:
            del self._buckets[entry[0]]

    def drop_cache(self) -> None:
        """Forgets every cached prefix (the weights were replaced, for instance). Raises ValueError
        while blocks are in use: their holders would make outdated content findable later."""
        if self.num_used:
            raise ValueError(f"cannot drop the prefix cache: {self.num_used} blocks are in use")
        while self._evictable:
            self._evict_one()

    # ---- integrity

    def check_integrity(self, expected_refs: np.ndarray | None = None) -> None:
        """Raises AssertionError with the state in its message. expected_refs: i32 [num_blocks]
        holders counted elsewhere."""
        free = self._free[: self._num_free].tolist()
        used = int((self.ref_counts > 0).sum())
        state = (
            f"free={len(free)} cached={len(self._evictable)} used={used} total={self.num_blocks}"
        )
        _require(len(free) + len(self._evictable) + used == self.num_blocks, state)
        _require(len(set(free)) == len(free), f"a block is free twice: {state}")
        _require(not set(free) & set(self._evictable), f"a block is free and cached: {state}")
        _require(not self.ref_counts[free].any(), f"a free block is held: {state}")
        _require(
            all(self.ref_counts[b] == 0 and b in self._entries for b in self._evictable),
            f"a cached block is held or unknown: {state}",
        )
        _require(
            all(self._buckets.get(e[0]) == b for b, e in self._entries.items()),
            f"cache entries and buckets differ: {state}",
        )
        _require(
            len(self._buckets) == len(self._entries),
            f"cache entries and buckets differ in number: {state}",
        )
        _require(
            not set(free) & set(self._entries),
            f"a free block is still in the prefix cache: {state}",
        )
        if expected_refs is not None:
            wrong = np.flatnonzero(expected_refs != self.ref_counts)
            _require(
                not wrong.size,
                f"reference counts of blocks {wrong.tolist()}: {self.ref_counts[wrong]}, held"
                f" {expected_refs[wrong]}; {state}",
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
