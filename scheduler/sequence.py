"""One request as the scheduler sees it.

While a sequence holds a running slot its counters, newest tokens and block table live in the
scheduler's `SlotTable` (struct of arrays); the properties here read through, so callers never need
to know where a value lives.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np


class SequenceStatus(IntEnum):
    WAITING = 0
    RESERVED = 1  # slot and blocks held for a hand-over whose KV has not arrived
    PROMPTED = 2  # all but the last token have KV; not yet running
    RUNNING = 3
    DETACHED = 4  # prefilled and handed over: only its blocks are still pinned here
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_ABORTED = 7
    FINISHED_IGNORED = 8
    FINISHED_PREEMPTED = 9
    FINISHED_ERROR = 10

    @property
    def is_finished(self) -> bool:
        return self >= SequenceStatus.FINISHED_STOPPED


FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_IGNORED: "prompt_length_exceeded",
    SequenceStatus.FINISHED_PREEMPTED: "insufficient_system_resource",
    SequenceStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True)
class ImageSpan:
    """Prompt tokens `[start, end)` stand for one image. digest identifies its pixels (empty:
    unknown, never prefix-cached)."""

    start: int
    end: int
    digest: bytes = b""


class SlotView(Protocol):
    """What a sequence reads from the table that holds its slot (`slots.SlotTable`)."""

    num_tokens: np.ndarray
    """i32 [slots]."""
    in_flight: np.ndarray
    """i32 [slots] scheduled steps whose results have not been processed."""

    def take_recent(self, slot: int) -> np.ndarray:
        """i32: the tokens of a slot that its sequence has not copied yet."""
        ...

    def blocks_of(self, slot: int) -> np.ndarray:
        """i32 view of the slot's block table."""
        ...

    def refresh(self, seq: Sequence) -> None:
        """Copies the length that the sequence keeps itself into its slot."""
        ...


class Sequence:
    """A request: its tokens, limits and place in the scheduler.

    prompt_token_ids: 1-D integers. eos_token_ids end the sequence with stop_reason None unless
    ignore_eos; stop_token_ids with stop_reason = the id; both only once min_tokens outputs exist
    (the ending token counts). max_tokens 0 means 1. image_spans: ImageSpan or (start, end[,
    digest]). chunk_checkpoints: positions at which a prefill chunk must end. schedulable: set False
    while image features are pending. Raises ValueError naming the request.
    """

    __slots__ = (
        "_buffer",
        "arrival_time",
        "cache_parent",
        "cache_salt",
        "cached_pages",
        "chunk_checkpoints",
        "chunks_in_flight",
        "decoding",
        "enqueue_time",
        "eos_token_ids",
        "epoch",
        "finish_reason",
        "grammar_active",
        "hit_tokens",
        "ignore_eos",
        "image_spans",
        "max_tokens",
        "min_tokens",
        "num_preemptions",
        "num_prefilled",
        "num_scheduled",
        "num_stored",
        "own_blocks",
        "priority",
        "prompt_len",
        "request_id",
        "schedulable",
        "shares_last_block",
        "skip_prefix_cache",
        "slot",
        "slot_table",
        "state_id",
        "status",
        "stop_reason",
        "stop_token_ids",
        "user_id",
    )

    def __init__(
        self,
        request_id: str | int,
        prompt_token_ids: Iterable[int] | np.ndarray,
        *,
        max_tokens: int,
        eos_token_ids: Iterable[int] = (),
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        priority: int = 0,
        user_id: str = "",
        arrival_time: float | None = None,
        cache_salt: str = "",
        skip_prefix_cache: bool = False,
        image_spans: Iterable[ImageSpan | tuple] = (),
        chunk_checkpoints: Iterable[int] = (),
    ) -> None:
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        if prompt.ndim != 1 or not prompt.size:
            raise ValueError(
                f"request {request_id!r}: the prompt needs at least one token, got shape"
                f" {prompt.shape}"
            )
        if max_tokens < 0:
            raise ValueError(f"request {request_id!r}: max_tokens must be >= 0, got {max_tokens}")
        self.request_id = request_id
        self.prompt_len = int(prompt.size)
        self.max_tokens = max(1, int(max_tokens))
        self.min_tokens = int(min_tokens)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"request {request_id!r}: min_tokens must lie in [0, max_tokens={self.max_tokens}],"
                f" got {min_tokens}"
            )
        self.eos_token_ids = tuple(int(t) for t in eos_token_ids)
        self.stop_token_ids = tuple(int(t) for t in stop_token_ids)
        self.ignore_eos = ignore_eos
        self.priority = priority
        self.user_id = user_id
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.cache_salt = cache_salt
        self.skip_prefix_cache = skip_prefix_cache
        self.image_spans = _image_spans(request_id, image_spans, self.prompt_len)
        self.chunk_checkpoints = tuple(sorted({int(c) for c in chunk_checkpoints}))
        self.schedulable = True
        self.grammar_active = False  # a grammar matcher cannot be rewound: preempted means stopped
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.hit_tokens = 0
        self.num_preemptions = 0
        self.slot = -1
        self.state_id = -1
        self.slot_table: SlotView | None = None
        self._buffer = prompt.copy()
        # Tokens in the own buffer; the newest ones may still be in the slot's row.
        self.num_stored = self.prompt_len
        # Tokens whose KV processed prefill steps computed. Meaningful until the sequence decodes.
        self.num_prefilled = 0
        # Prompt tokens whose KV is computed or in flight.
        self.num_scheduled = 0
        # All tokens but the last have KV.
        self.decoding = False
        self.chunks_in_flight = 0
        # Counts the lives that preemptions end: results of an earlier life are dropped.
        self.epoch = 0
        # The block table while no slot holds it.
        self.own_blocks = np.empty(0, np.int32)
        # A fork that must clone its half-written last block before it writes.
        self.shares_last_block = False
        # Leading pages that the prefix cache knows; -1: the chain is broken.
        self.cached_pages = 0
        self.cache_parent: int | str = cache_salt
        self.enqueue_time = 0.0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, prompt_len={self.prompt_len},"
            f" num_tokens={self.num_tokens}, num_cached={self.num_cached}, slot={self.slot},"
            f" blocks={self.num_blocks})"
        )

    # ---- tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and processed outputs."""
        if self.slot_table is None:
            return self.num_stored
        return int(self.slot_table.num_tokens[self.slot])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def token_ids(self) -> np.ndarray:
        """i32 view of all known tokens; do not write."""
        self.sync()
        return self._buffer[: self.num_stored]

    @property
    def prompt_token_ids(self) -> np.ndarray:
        return self._buffer[: self.prompt_len]

    @property
    def output_token_ids(self) -> np.ndarray:
        """i32 view of the tokens after the prompt; do not write."""
        return self.token_ids[self.prompt_len :]

    def sync(self) -> None:
        """Moves the newest tokens from the slot's row into this sequence's own buffer."""
        if self.slot_table is not None:
            recent = self.slot_table.take_recent(self.slot)
            if recent.size:
                self.append_tokens(recent)

    def append_tokens(self, tokens: np.ndarray) -> None:
        """tokens: i32 [n], appended to the own buffer."""
        end = self.num_stored + tokens.size
        if end > self._buffer.size:
            self.reserve_storage(max(end, 2 * self._buffer.size))
        self._buffer[self.num_stored : end] = tokens
        self.num_stored = end

    def reserve_storage(self, capacity: int) -> None:
        """Room for `capacity` tokens in the own buffer."""
        if capacity > self._buffer.size:
            grown = np.empty(capacity, np.int32)
            grown[: self.num_stored] = self._buffer[: self.num_stored]
            self._buffer = grown

    # ---- KV

    @property
    def num_cached(self) -> int:
        """Tokens whose KV is computed, as far as processed steps tell."""
        return self.num_tokens - 1 if self.decoding else self.num_prefilled

    @property
    def num_in_flight(self) -> int:
        """Scheduled steps whose results have not been processed."""
        if self.slot_table is None:
            return self.chunks_in_flight
        return self.chunks_in_flight + int(self.slot_table.in_flight[self.slot])

    @property
    def block_ids(self) -> np.ndarray:
        """i32 view of the block table; do not write."""
        return self.own_blocks if self.slot_table is None else self.slot_table.blocks_of(self.slot)

    @property
    def num_blocks(self) -> int:
        return self.block_ids.size

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def stops_at(self, token_id: int) -> bool:
        """The token, as the newest one, ends this sequence."""
        if self.num_output_tokens < self.min_tokens:
            return False
        return token_id in self.stop_token_ids or (
            token_id in self.eos_token_ids and not self.ignore_eos
        )

    def load_prefix(self, output_token_ids: Iterable[int], num_cached: int | None = None) -> None:
        """Takes over a prefix computed elsewhere: tokens sampled there, and how many tokens have KV
        (default: all but the last).

        Only before the sequence is queued. Raises ValueError when num_cached is not in [0,
        num_tokens - 1].
        """
        if (
            self.status not in (SequenceStatus.WAITING, SequenceStatus.RESERVED)
            or self.num_in_flight
        ):
            raise ValueError(
                f"request {self.request_id!r}: cannot load a prefix in status {self.status.name}"
            )
        self.sync()
        self.append_tokens(np.asarray(list(output_token_ids), dtype=np.int32))
        cached = self.num_stored - 1 if num_cached is None else int(num_cached)
        if not 0 <= cached <= self.num_stored - 1:
            raise ValueError(
                f"request {self.request_id!r}: num_cached must lie in [0, {self.num_stored - 1}],"
                f" got {cached}"
            )
        self.num_prefilled = self.num_scheduled = cached
        if self.slot_table is not None:
            self.slot_table.refresh(self)

    # ---- chunk boundaries

    def next_checkpoint(self, after: int) -> int | None:
        """Smallest chunk checkpoint > `after`."""
        i = bisect_right(self.chunk_checkpoints, after)
        return self.chunk_checkpoints[i] if i < len(self.chunk_checkpoints) else None

    def image_around(self, position: int) -> ImageSpan | None:
        """The image that a chunk ending (or starting) at `position` would split."""
        for span in self.image_spans:
            if span.start < position < span.end:
                return span
        return None


def _image_spans(
    request_id: str | int, spans: Iterable[ImageSpan | tuple], prompt_len: int
) -> tuple[ImageSpan, ...]:
    result = tuple(span if isinstance(span, ImageSpan) else ImageSpan(*span) for span in spans)
    end = 0
    for span in result:
        if not end <= span.start < span.end <= prompt_len:
            raise ValueError(
                f"request {request_id!r}: image span [{span.start}, {span.end}) must be non-empty,"
                f" ascending, disjoint and inside the prompt of {prompt_len} tokens"
            )
        end = span.end
    return result
