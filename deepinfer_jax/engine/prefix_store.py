"""The engine's side of the KV store: what is loaded when a request comes, and what is saved when
one is prefilled or ends.

A new request stays out of the waiting queue while a thread looks up and reads its prefix; others
are served meanwhile. What arrives becomes blocks of the device's prefix cache, which the scheduler
then finds as if they had been computed here: sharing, eviction and hit counts need nothing of their
own. Saving copies blocks aside on the device, behind the step that wrote them; a thread brings them
to the host and to disk.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.config import EngineArgs
from deepinfer_jax.engine.kv_identity import KVIdentity
from deepinfer_jax.engine.requests import Completion
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.kv.payload import Payload
from deepinfer_jax.kv.store import KVStore
from deepinfer_jax.kv.store_format import chain_keys, root_key
from deepinfer_jax.kv.tiers import Loaded, Prefix, TieredStore
from deepinfer_jax.models.base import restart_positions
from deepinfer_jax.scheduler import resume
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)

PENDING_BYTES = 1 << 29
"""Device memory of blocks copied aside and not yet on the host; beyond it blocks are not saved."""
REMEMBERED = 1 << 20
"""Keys of saved pages an engine remembers, so as not to save them again."""


@dataclass(eq=False)
class _Load:
    c: Completion
    prefix: Prefix
    loaded: Loaded | None = None


class PrefixStore:
    """One engine's use of a TieredStore. Calls come from the engine's thread, under its lock; files
    are touched by threads here."""

    def __init__(
        self,
        schedulers: Seq[Scheduler],
        mover: BlockMover,
        store: TieredStore,
        identity: KVIdentity,
        by_user: bool = False,
    ) -> None:
        """by_user: what a user's requests have computed is for that user only. ValueError for a
        model with per-sequence state."""
        if "states" in mover.kinds and not restart_positions(mover.specs["states"]):
            raise ValueError(
                "a KV store needs a model whose per-sequence state can be made of its blocks: a"
                " reused prefix has blocks but no state"
            )
        self.schedulers, self.mover, self.store = schedulers, mover, store
        self.layout, self.block_size = identity.to_dict(), identity.block_size
        self._by_user = by_user
        self.counters: Counter[str] = Counter()
        self.loading = 0
        """Requests whose prefix is on its way."""
        self._arrived: deque[_Load] = deque()
        self._arrival = threading.Condition()
        self._loader = ThreadPoolExecutor(2, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save")
        self._saved: OrderedDict[str, None] = OrderedDict()
        self._pending_bytes = 0  # of both threads: under _pending_lock
        self._pending_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        args: EngineArgs,
        schedulers: Seq[Scheduler],
        mover: BlockMover,
        identity: KVIdentity,
    ) -> PrefixStore:
        """The store that an engine's arguments ask for."""
        disk = None
        if args.kv_store is not None:
            disk = KVStore(args.kv_store, identity.to_dict(), max_bytes=args.kv_store_bytes)
        write_back = args.kv_store_write == "back"
        tiers = TieredStore(mover.row_shapes("blocks"), disk, args.kv_host_bytes, write_back)
        return cls(schedulers, mover, tiers, identity, args.kv_store_namespace == "user")

    def prefix_of(self, seq: Sequence, pages: int, first: int = 0) -> Prefix:
        """Pages first .. pages - 1 of a sequence."""
        namespace = seq.user_id if self._by_user else ""
        tokens = np.array(seq.token_ids[: pages * self.block_size], np.int32)
        root = root_key(self.layout, namespace, seq.cache_salt)
        keys = [root, *chain_keys(root, tokens, self.block_size)]
        return Prefix(
            namespace,
            seq.cache_salt,
            keys[first],
            keys[first + 1 :],
            tokens,
            first,
            self.block_size,
        )

    # ---- loading ---------------------------------------------------------------------------------

    def enqueue(self, c: Completion) -> None:
        """Queues a new sequence, at once or when the rest of its prefix has been looked for."""
        seq, s = c.seq, self.schedulers[c.rank]
        pages, known = self._pages_known(seq, s)
        if known == pages:
            s.add_request(seq)
            return
        s.add_request(seq, enqueue=False)
        self.loading += 1
        self._loader.submit(self._load, _Load(c, self.prefix_of(seq, pages, known)))

    def _pages_known(self, seq: Sequence, s: Scheduler) -> tuple[int, int]:
        """(whole pages of a prompt, how many of them the device has); equal where looking for the
        rest is of no use."""
        pages = (seq.num_tokens - 1) // self.block_size
        too_long = seq.num_tokens > s.config.prompt_limit
        if seq.skip_prefix_cache or seq.image_spans or not pages or too_long:
            return pages, pages
        known = s.prefix.find(seq).blocks.size
        self.counters["device_hits"] += known
        return pages, known

    def _load(self, load: _Load) -> None:
        try:
            if not load.c.seq.is_finished:
                load.loaded = self.store.load(load.prefix)
        except Exception:
            self.counters["failed_loads"] += 1
            logger.exception(
                "loading the prefix of request %s failed, it is computed", load.c.seq.request_id
            )
        finally:
            with self._arrival:
                self._arrived.append(load)
                self._arrival.notify_all()

    def queue_loaded(self, timeout: float) -> list[Sequence]:
        """Puts what has arrived into the prefix cache and queues the sequences that waited for it.
        Waits up to `timeout` s for the first. Returns those that have ended meanwhile: they are to
        be released."""
        ended = []
        for c in self._take_loaded(timeout):
            if c.seq.is_finished:
                ended.append(c.seq)
            else:
                self.schedulers[c.rank].enqueue_waiting(c.seq)
        return ended

    def _take_loaded(self, timeout: float) -> list[Completion]:
        if not self.loading:
            return []
        with self._arrival:
            if not self._arrived and timeout:
                self._arrival.wait(timeout)
            arrived = list(self._arrived)
            self._arrived.clear()
        self.loading -= len(arrived)
        items = []
        for load in arrived:
            for key in load.prefix.keys[load.loaded.count if load.loaded is not None else 0 :]:
                self._saved.pop(key, None)  # no tier has it any more: to be saved again
            if load.loaded is not None and load.loaded.count and not load.c.seq.is_finished:
                items += self._insert(load.c, load.prefix, load.loaded)
        self.mover.scatter(items)
        return [load.c for load in arrived]

    def _insert(
        self, c: Completion, prefix: Prefix, loaded: Loaded
    ) -> list[tuple[Payload, list[int]]]:
        s, step = self.schedulers[c.rank], self.block_size
        contents = [
            prefix.tokens[i * step : (i + 1) * step].tobytes()
            for i in range(prefix.first + loaded.count)
        ]
        new = resume.insert_pages(s.blocks, c.seq.cache_salt, contents, prefix.first)
        if not new:
            return []
        rows = [page - prefix.first for _, page in new]
        self.counters["loaded"] += len(new)
        items, at = [], 0
        for payload in self.mover.from_host({n: a[rows] for n, a in loaded.arrays.items()}, c.rank):
            items.append((payload, [block for block, _ in new[at : at + payload.count]]))
            at += payload.count
        return items

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, seq: Sequence, rank: int) -> None:
        """Saves the computed whole pages of a sequence that still holds its blocks, as far as they
        are not known to be saved."""
        pages = min(seq.num_cached // self.block_size, seq.num_blocks)
        if not pages or seq.image_spans or seq.status is SequenceStatus.FINISHED_ERROR:
            return
        keys = self.prefix_of(seq, pages).keys
        first = next((i for i, key in enumerate(keys) if key not in self._saved), pages)
        if first == pages:
            return
        nbytes = (pages - first) * self.mover.block_bytes()
        if self._pending_bytes + nbytes > PENDING_BYTES:
            self.counters["dropped"] += pages - first
            return
        self._count_pending(nbytes)
        prefix = self.prefix_of(seq, pages, first)
        ids = [[] for _ in self.schedulers]
        ids[rank] = seq.block_ids[first:pages].tolist()
        payloads = self.mover.gather(ids)[rank]
        for key in prefix.keys:
            self._saved[key] = None
        while len(self._saved) > REMEMBERED:
            self._saved.popitem(last=False)
        self._saver.submit(self._save, prefix, payloads, nbytes)

    def _save(self, prefix: Prefix, payloads: list[Payload], nbytes: int) -> None:
        try:
            parts = [self.mover.to_host(p) for p in payloads]
            self.store.save(prefix, {n: np.concatenate([p[n] for p in parts]) for n in parts[0]})
        except Exception:
            self.counters["failed_saves"] += 1
            logger.exception("saving %d pages failed", len(prefix.keys))
        finally:
            self._count_pending(-nbytes)

    def _count_pending(self, nbytes: int) -> None:
        with self._pending_lock:
            self._pending_bytes += nbytes

    def wait_saved(self) -> None:
        """Everything saved so far is where it belongs, on disk with write-through."""
        self._saver.submit(lambda: None).result()

    def stats(self) -> dict[str, Any]:
        """Pages by what became of them: device_hits, host_hits, disk_hits, misses, saved,
        disk_corrupt, disk_errors, ..."""
        return dict(self.counters) | self.store.stats() | {"loading": self.loading}

    def close(self) -> None:
        """Waits for saves, writes back what is in host memory only."""
        self._loader.shutdown()
        self._saver.shutdown()
        self.store.close()
