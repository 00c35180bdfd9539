"""Histograms that take whole arrays: one call per step, whatever the number of sequences."""

from __future__ import annotations

import numpy as np

SECONDS = tuple(float(f"{m}e{e}") for e in range(-5, 2) for m in (1, 2, 5))
"""Upper bounds from 10 us to 50 s, 1-2-5 spaced: steps and gaps of any device fall in between."""


class Histogram:
    """Counts of observations per bucket (upper bounds inclusive, the last one open),
    and their sum."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = np.array(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[self.bounds.searchsorted(value)] += 1
        self.sum += value

    def observe_many(self, values: np.ndarray) -> None:
        """values: float64 [n]. Sequences of one batch wait alike, so that all values mostly fall
        into one bucket."""
        if not len(values):
            return
        low, high = self.bounds.searchsorted((values.min(), values.max()))
        if low == high:
            self.counts[low] += len(values)
        else:
            self.counts += np.bincount(self.bounds.searchsorted(values), minlength=len(self.counts))
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus buckets: (upper bound as text, observations up to it), ending with "+Inf"."""
        names = [*(f"{b:g}" for b in self.bounds), "+Inf"]
        return list(zip(names, np.cumsum(self.counts).tolist(), strict=True))

    def summary(self) -> dict[str, float]:
        """{"p50", "p90", "p99", "mean", "count"}; quantiles are interpolated inside
        their bucket."""
        count = self.count
        if not count:
            return {"count": 0}
        return {f"p{q}": self.quantile(q / 100) for q in (50, 90, 99)} | {
            "mean": self.sum / count,
            "count": count,
        }

    def quantile(self, q: float) -> float:
        """The q-quantile, linear inside its bucket; the open last bucket counts as its
        lower bound."""
        ends = np.cumsum(self.counts)
        rank = q * ends[-1]
        i = int(ends.searchsorted(rank))
        if i >= len(self.bounds):
            return float(self.bounds[-1])
        low = self.bounds[i - 1] if i else 0.0
        below = ends[i - 1] if i else 0
        return float(low + (self.bounds[i] - low) * (rank - below) / self.counts[i])
