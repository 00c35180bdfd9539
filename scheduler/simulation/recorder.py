"""Books what happens to every request while a simulation runs; refuses to book the same
end twice."""

from __future__ import annotations

import numpy as np

from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.scheduler.simulation.result import RequestTable
from deepinfer_jax.scheduler.simulation.traces import Trace


def row_of(seq: Sequence) -> int:
    """The trace's row that a sequence serves: a simulation names its requests by it."""
    assert isinstance(seq.request_id, int), seq.request_id
    return seq.request_id


class Recorder:
    """Per-request times (arrays over the rows of the trace) and the gaps between tokens."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace)
        self.trace = trace
        self.first_scheduled = np.full(count, np.nan)
        self.first_token = np.full(count, np.nan)
        self.last_token = np.full(count, np.nan)
        self.finished = np.full(count, np.nan)
        self.output_tokens = np.zeros(count, np.int64)
        self.hit_tokens = np.zeros(count, np.int64)
        self.preemptions = np.zeros(count, np.int64)
        self.finish_reason: list[str | None] = [None] * count
        self.engine = [""] * count
        self.num_ended = 0
        self._gaps: list[
            float
        ] = []  # equal neighbours counted together: a step gives most rows the same gap
        self._gap_counts: list[int] = []

    def scheduled(self, seq: Sequence, start: float) -> None:
        row = row_of(seq)
        if np.isnan(self.first_scheduled[row]):
            self.first_scheduled[row] = start
            self.hit_tokens[row] = seq.hit_tokens

    def token(self, row: int, now: float) -> None:
        """One token of one request: the first, or one after a recomputation."""
        if np.isnan(self.first_token[row]):
            self.first_token[row] = now
        else:
            self._gap(now - float(self.last_token[row]), 1)
        self.last_token[row] = now

    def tokens(self, rows: np.ndarray, accepted: np.ndarray, now: float) -> None:
        """accepted[i] >= 1 tokens of request rows[i], at the same moment: accepted drafts follow
        each other without a gap."""
        if not rows.size:
            return
        gaps = now - self.last_token[rows]
        self.last_token[rows] = now
        low = gaps.min()
        if low == gaps.max():
            self._gap(float(low), rows.size)
        else:
            for gap, count in zip(
                *(part.tolist() for part in np.unique(gaps, return_counts=True)), strict=True
            ):
                self._gap(gap, count)
        extra = int(accepted.sum()) - rows.size
        if extra:
            self._gap(0.0, extra)

    def _gap(self, seconds: float, count: int) -> None:
        if self._gaps and self._gaps[-1] == seconds:
            self._gap_counts[-1] += count
        else:
            self._gaps.append(seconds)
            self._gap_counts.append(count)

    def has_ended(self, row: int) -> bool:
        return self.finish_reason[row] is not None

    def end(self, seq: Sequence, now: float, engine: str, reason: str | None = None) -> None:
        row = row_of(seq)
        if self.has_ended(row):
            raise RuntimeError(
                f"request {row} ends a second time: {self.finish_reason[row]!r}, now"
                f" {reason or seq.finish_reason!r}"
            )
        self.finish_reason[row] = reason or seq.finish_reason
        self.finished[row] = now
        self.output_tokens[row] = seq.num_output_tokens
        self.engine[row] = engine
        self.num_ended += 1

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._gaps, np.float64), np.array(self._gap_counts, np.int64)

    def table(self) -> RequestTable:
        """Raises RuntimeError unless every request has ended."""
        reasons = tuple(reason for reason in self.finish_reason if reason is not None)
        missing = len(self.finish_reason) - len(reasons)
        if missing:
            first = self.finish_reason.index(None)
            raise RuntimeError(f"{missing} requests never ended, the first is {first}")
        return RequestTable(
            arrival=self.trace.timestamps,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            finished=self.finished,
            prompt_tokens=self.trace.input_lengths,
            hit_tokens=self.hit_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            finish_reason=reasons,
            engine=tuple(self.engine),
        )
