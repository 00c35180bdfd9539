"""Bringing an engine's blocks to the host while its steps go on: the bytes of one moment, for a
pause far below a step.

At the moment itself only what the next step may write is copied on the device: each sequence's
last, partly filled block, and state rows. Full blocks do not change while anybody holds them, so
they follow in slices, one between two steps, each as large as fits into a small share of the time
between them. A block that is handed out again before its turn is copied just before
(`BlockManager.before_overwriting`), behind the steps that wrote it and ahead of the step that will
overwrite it. So no block is held back, and the device holds copies of a slice, not of everything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice

import numpy as np

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.kv.payload import Payload

SHARE = 0.1
"""Of the time between two steps that copying a slice may take."""
CPU_RATE, DEVICE_RATE = 1.5e9, 3e11
"""Bytes per second that copies reach at least, on CPU into fresh memory and on an accelerator."""


class Rows:
    """Numbers the blocks (or state rows) of all ranks; `changing` are those that the next step may
    write."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int]] = []
        self.changing: set[int] = set()
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, rank: int, item: int, changing: bool) -> int:
        """The number of a rank's block; one that is known keeps its number."""
        number = self._numbers.setdefault((rank, item), len(self.items))
        if number == len(self.items):
            self.items.append((rank, item))
        if changing:
            self.changing.add(number)
        return number

    def __len__(self) -> int:
        return len(self.items)


class EngineCopy:
    """The contents of `rows` ({kind: Rows}) as of now. Made at a step boundary, under the engine's
    lock; `fill` runs in a thread.

    share: of the time between steps that copying may take; may be changed. holds: seconds of each
    slice during which no step could run.
    """

    def __init__(self, engine: LLMEngine, rows: Mapping[str, Rows]) -> None:
        self.engine, self.rows, self.mover, self.share = engine, rows, engine.ensure_mover(), SHARE
        self.holds: list[float] = []
        self._copied: deque[tuple[str, np.ndarray, Payload]] = deque()  # on the device
        self._left: list[dict[int, int]] = [{} for _ in engine.schedulers]  # per rank: block -> row
        for kind, numbered in rows.items():
            self._gather(kind, sorted(numbered.changing))
        for number, (rank, block) in enumerate(rows["blocks"].items):
            if number not in rows["blocks"].changing:
                self._left[rank][block] = number
        self._hooks = [
            partial(self._before_overwriting, rank) for rank in range(len(engine.schedulers))
        ]
        for s, hook in zip(engine.schedulers, self._hooks, strict=True):
            s.blocks.before_overwriting.append(hook)
        on_cpu = engine.mesh.devices.flat[0].platform == "cpu"
        self._rate = (
            CPU_RATE / len(engine.schedulers) if on_cpu else DEVICE_RATE
        )  # per rank: CPU devices share one memory
        self._last = time.perf_counter()

    def fill(self, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Writes everything into {kind: {cache: [rows, layers, *entry]}}; waits for step boundaries
        and the device. Not the thread that steps the engine, unless nobody else does."""
        try:
            more = True
            while more:
                more = self.engine.boundary.run(self.copy_slice)
                self._bring(arrays)
        finally:
            self.engine.boundary.run(self._stop)
        self._bring(arrays)

    def copy_slice(self) -> bool:
        """Copies the next blocks of every rank on the device; whether there are more. At a step
        boundary."""
        start = time.perf_counter()
        count = self._slice_blocks(start - self._last)
        chosen = [list(islice(left, count)) for left in self._left]
        self._gather(
            "blocks",
            [self._left[rank].pop(b) for rank, blocks in enumerate(chosen) for b in blocks],
        )
        self._last = time.perf_counter()
        self.holds.append(self._last - start)
        return any(self._left)

    def _slice_blocks(self, interval: float) -> int:
        """Blocks per rank: the largest bucket that takes no more than its share of the time since
        the last slice."""
        room = self.share * interval * self._rate / self.mover.block_bytes()
        return max((b for b in self.mover.buckets if b <= room), default=self.mover.buckets[0])

    def _before_overwriting(self, rank: int, blocks: np.ndarray) -> None:
        left = self._left[rank]
        self._gather("blocks", [left.pop(b) for b in blocks.tolist() if b in left])

    def _gather(self, kind: str, numbers: Iterable[int]) -> None:
        """Enqueues copies of rows."""
        by_rank: list[list[int]] = [[] for _ in self._left]
        for number in numbers:
            by_rank[self.rows[kind].items[number][0]].append(number)
        if not any(by_rank):
            return
        items = self.rows[kind].items
        payloads = self.mover.gather([[items[n][1] for n in own] for own in by_rank], kind)
        for own, parts in zip(by_rank, payloads, strict=True):
            at = 0
            for payload in parts:
                self._copied.append((kind, np.array(own[at : at + payload.count]), payload))
                at += payload.count

    def _bring(self, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        while self._copied:
            kind, numbers, payload = self._copied.popleft()
            for name, rows in self.mover.to_host(payload).items():
                arrays[kind][name][numbers] = rows

    def _stop(self) -> None:
        for s, hook in zip(self.engine.schedulers, self._hooks, strict=True):
            s.blocks.before_overwriting.remove(hook)
