"""What schedule() hands to the engine, and what process_outputs() hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from deepinfer_jax.scheduler.sequence import Sequence


class StepType(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


_NO_INT = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """Tokens `[q_start, q_start + q_len)` of one sequence; a token is sampled from the last row iff
    `is_last`."""

    seq: Sequence
    q_start: int
    q_len: int
    is_last: bool
    epoch: int = 0
    """Which life of the sequence this chunk belongs to: results of a life ended by a preemption are
    dropped."""

    @property
    def kv_len(self) -> int:
        """Keys once this chunk is written."""
        return self.q_start + self.q_len


@dataclass(slots=True, eq=False)
class SchedulerOutputs:
    """One step of one rank. An empty one (no prefill, no slots) is a legal step: the rank runs a
    placeholder of `step_type`.

    Before the forward pass the engine runs `clone_blocks` and `clone_states` ((source, destination)
    pairs, all reads before any write), then zeroes `zero_states`, then writes the whole
    block table of each slot in `admitted`, then applies `block_updates` to the others.
    """

    step_type: StepType
    prefill: list[PrefillItem] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: _NO_INT)
    """i32 [n] decoding slots, longest sequence first."""
    q_lens: np.ndarray = field(default_factory=lambda: _NO_INT)
    """i32 [n] 1 + drafts to verify."""
    kv_lens: np.ndarray = field(default_factory=lambda: _NO_INT)
    """i32 [n] keys after this step's write. While a step with drafts is in flight: the upper bound
    (no draft rejected)."""
    serials: np.ndarray = field(default_factory=lambda: _NO_INT)
    """i64 [n] occupancy number of each slot: results for a slot that has changed hands are dropped.
    """
    admitted: list[Sequence] = field(default_factory=list)
    """Got a running slot in this schedule(): last prompt chunk scheduled, or moved from `prompted`
    to `running`."""
    block_updates: tuple[np.ndarray, np.ndarray, np.ndarray] = (_NO_INT, _NO_INT, _NO_INT)
    """(slots, page_index, block_id), i32 each: what the tables of running slots have grown by.
    Slots of `admitted` are left out: their whole table is written when they are admitted.
    No (slot, page) pair occurs twice."""
    clone_blocks: list[tuple[int, int]] = field(default_factory=list)
    clone_states: list[tuple[int, int]] = field(default_factory=list)
    zero_states: list[int] = field(default_factory=list)
    ignored: list[Sequence] = field(default_factory=list)
    """Ended while waiting (prefill steps): refused, aborted or failed. Everything they held is
    already released."""
    finished: list[Sequence] = field(default_factory=list)
    """Ended since the last schedule(): each holds its slot and blocks until free_seq()."""
    preempted: list[Sequence] = field(default_factory=list)
    """Lost their blocks in this schedule(): to be recomputed, or, when `seq.is_finished`, stopped
    (then also in `finished`)."""
    seq_by_slot: list[Sequence | None] = field(default_factory=list)
    """The sequence of every slot as of this schedule()."""

    @property
    def is_prefill(self) -> bool:
        return self.step_type is StepType.PREFILL

    @property
    def is_empty(self) -> bool:
        """Nothing to compute: a placeholder step."""
        return not self.prefill and not self.slots.size

    @property
    def seqs(self) -> list[Sequence]:
        """The scheduled sequences, in row order (built when asked for)."""
        if self.is_prefill:
            return [item.seq for item in self.prefill]
        return [self.seq_by_slot[slot] for slot in self.slots.tolist()]

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass without padding."""
        return (
            sum(item.q_len for item in self.prefill) if self.is_prefill else int(self.q_lens.sum())
        )


@dataclass(slots=True, eq=False)
class Processed:
    """Result of process_outputs(). finished: sequences that ended by this step's tokens, in row
    order. num_accepted: i32 [n] tokens appended per row; 0 where the result was surplus (dropped)
    or the chunk was not the last."""

    finished: list[Sequence]
    num_accepted: np.ndarray
