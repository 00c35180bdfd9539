"""Struct-of-arrays state of the running slots.

A steady decode step touches only these arrays: a handful of NumPy calls whatever the number of
sequences. Python runs per sequence on events only (bind, finish, preempt, full token row).
"""

from __future__ import annotations

import heapq

import numpy as np

from deepinfer_jax.scheduler.sequence import Sequence

RECENT_TOKENS = 256
"""Tokens kept per slot before they move to the sequence's own buffer: one Python call per sequence
and this many steps. Rows start at different offsets, so that sequences admitted together do not all
move their tokens in the same step."""
_NO_TOKEN = -1


class SlotTable:
    """Per-slot arrays, all indexed by slot. A slot is held from bind() to unbind(); `active` marks
    the decoding ones."""

    def __init__(self, num_slots: int, max_pages: int, block_size: int) -> None:
        self.num_slots, self.max_pages, self.block_size = num_slots, max_pages, block_size
        self.block_tables = np.zeros((num_slots, max_pages), np.int32)
        self.pages = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)  # tokens the slot's blocks can store
        self.num_tokens = np.zeros(num_slots, np.int32)
        # num_tokens if the steps in flight accept all their drafts
        self.max_num_tokens = np.zeros(num_slots, np.int32)
        self.in_flight = np.zeros(num_slots, np.int32)
        self.max_len = np.zeros(num_slots, np.int32)  # ends by length at this many tokens
        self.min_len = np.zeros(num_slots, np.int32)  # stop tokens count from this many tokens on
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.priority = np.zeros(num_slots, np.int64)
        self.num_drafts = np.zeros(num_slots, np.int32)  # drafts to verify in the next decode step
        self.serial = np.zeros(num_slots, np.int64)  # changes whenever the slot changes hands
        self.active = np.zeros(num_slots, bool)
        self.admission = np.zeros(num_slots, np.int64)  # order of admission
        self.stop_ids = np.full((num_slots, 1), _NO_TOKEN, np.int32)
        self._recent = np.zeros((num_slots, RECENT_TOKENS), np.int32)
        self._recent_start = np.zeros(num_slots, np.intp)
        self._recent_end = np.zeros(num_slots, np.intp)
        self._seqs: list[Sequence | None] = [None] * num_slots
        self._seqs_shared = False
        self._free = list(range(num_slots))  # a heap: the lowest slot first
        self._order = np.empty(0, np.intp)
        self._order_valid = True
        self.num_active = 0
        self._num_admissions = 0

    # ---- holding

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    def bind(self, seq: Sequence, max_len: int, num_drafts: int) -> int:
        """Gives `seq` a free slot and moves its block table into it. The slot decodes from
        activate() on."""
        slot = heapq.heappop(self._free)
        blocks = seq.own_blocks
        self.block_tables[slot, : blocks.size] = blocks
        self.pages[slot] = blocks.size
        self.capacity[slot] = blocks.size * self.block_size
        self.in_flight[slot] = 0
        self.max_len[slot] = max_len
        # beyond max_len it makes no difference, and 32 bits may not hold it
        self.min_len[slot] = min(seq.prompt_len + seq.min_tokens, max_len)
        self.prompt_len[slot] = seq.prompt_len
        self.priority[slot] = seq.priority
        self.num_drafts[slot] = num_drafts
        self.serial[slot] += 1
        self._recent_start[slot] = self._recent_end[slot] = slot % RECENT_TOKENS
        self._set_stop_ids(slot, seq)
        self._own_seqs()[slot] = seq
        seq.slot, seq.slot_table = slot, self
        self.refresh(seq)
        return slot

    def refresh(self, seq: Sequence) -> None:
        """Copies the length kept by the sequence itself into its slot (bind, hand-over)."""
        self.num_tokens[seq.slot] = self.max_num_tokens[seq.slot] = seq.num_stored

    def unbind(self, seq: Sequence, keep_blocks: bool) -> None:
        """Takes the slot away. keep_blocks: the sequence goes on holding its block table, otherwise
        the caller has released it."""
        seq.sync()
        slot = seq.slot
        self.deactivate(slot)
        seq.own_blocks = self.blocks_of(slot).copy() if keep_blocks else np.empty(0, np.int32)
        self.pages[slot] = self.capacity[slot] = 0
        self.serial[slot] += 1
        self._own_seqs()[slot] = None
        seq.slot, seq.slot_table = -1, None
        heapq.heappush(self._free, slot)

    def activate(self, slot: int) -> None:
        self.active[slot] = True
        self.num_active += 1
        self._order_valid = False
        self.admission[slot] = self._num_admissions
        self._num_admissions += 1

    def deactivate(self, slot: int) -> None:
        if self.active[slot]:
            self.active[slot] = False
            self.num_active -= 1
            self._order_valid = False

    def drop_blocks(self, slot: int) -> None:
        self.pages[slot] = self.capacity[slot] = 0

    def blocks_of(self, slot: int) -> np.ndarray:
        return self.block_tables[slot, : self.pages[slot]]

    def seq_at(self, slot: int) -> Sequence:
        """The sequence of a bound slot."""
        seq = self._seqs[slot]
        assert seq is not None, slot
        return seq

    def snapshot_seqs(self) -> list[Sequence | None]:
        """The sequence of every slot as of now; later changes of this table do not show in the
        returned list."""
        self._seqs_shared = True
        return self._seqs

    def _own_seqs(self) -> list[Sequence | None]:
        if self._seqs_shared:
            self._seqs = list(self._seqs)
            self._seqs_shared = False
        return self._seqs

    def _set_stop_ids(self, slot: int, seq: Sequence) -> None:
        ids = seq.stop_token_ids if seq.ignore_eos else seq.eos_token_ids + seq.stop_token_ids
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            extra = np.full((self.num_slots, len(ids) - width), _NO_TOKEN, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, extra], axis=1)
        self.stop_ids[slot] = _NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids

    # ---- the steady path

    def ordered(self, lengths_drift: bool) -> np.ndarray:
        """intp [n] active slots, longest sequence first (ties: higher slot first).

        Without drafts every sequence grows by one, so the order only changes on events and is kept
        (lengths_drift False).
        """
        if lengths_drift or not self._order_valid:
            slots = np.flatnonzero(self.active)
            keys = (self.num_tokens[slots].astype(np.int64) << 32) | slots
            keys.sort()
            self._order = (keys[::-1] & 0xFFFFFFFF).astype(np.intp)
            self._order_valid = True
        return self._order

    def append(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Appends one token per slot; bool [n]: the sequence ends with it."""
        end = self._recent_end[slots]
        self._recent[slots, end] = tokens
        self._recent_end[slots] = end + 1
        lengths = self.num_tokens[slots] + 1
        self.num_tokens[slots] = lengths
        full = end == RECENT_TOKENS - 1
        if full.any():
            for slot in slots[full].tolist():
                self._seqs[slot].sync()
        done = lengths >= self.max_len[slots]
        hit = self.stopping(slots, tokens, lengths)
        return done if hit is None else done | hit

    def stopping(
        self, slots: np.ndarray, tokens: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray | None:
        """bool [n]: the token is a stop token that counts already; None: no token is any."""
        ids = self.stop_ids
        hit = (
            ids[slots, 0] == tokens
            if ids.shape[1] == 1
            else (ids[slots] == tokens[:, None]).any(axis=1)
        )
        return hit & (lengths >= self.min_len[slots]) if hit.any() else None

    def take_recent(self, slot: int) -> np.ndarray:
        """Removes and returns the tokens not yet moved to the sequence: a view, valid until the
        next append()."""
        start, end = self._recent_start[slot], self._recent_end[slot]
        if start < end:
            self._recent_start[slot] = self._recent_end[slot] = 0
        return self._recent[slot, start:end]

    def add_pages(
        self, slots: np.ndarray, counts: np.ndarray, blocks: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Appends counts[i] of `blocks` to the table of slots[i]; returns (slot, page) of every
        block, i32."""
        rows = np.repeat(slots, counts)
        first = np.cumsum(counts) - counts
        pages = np.repeat(self.pages[slots], counts) + (
            np.arange(rows.size) - np.repeat(first, counts)
        )
        self.block_tables[rows, pages] = blocks
        self.pages[slots] += counts
        self.capacity[slots] = self.pages[slots] * self.block_size
        return rows.astype(np.int32), pages.astype(np.int32)
