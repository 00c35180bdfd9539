"""What is known of the balance: numbers for statistics, a line for the log, a table by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from deepinfer_jax.experts.policy import imbalance


class BalanceReport:
    """before, now: per layer, tokens of the most loaded rank over those of the mean rank, with the
    counts last read. `now` differs from `before` once experts have moved."""

    def __init__(self, layers: int) -> None:
        self.before: Float[np.ndarray, " layers"] = np.ones(layers)
        self.now: Float[np.ndarray, " layers"] = np.ones(layers)
        self.version = 0  # of the placement: rearrangements since the first one of the file
        self.rearrangements = 0
        self.slots_moved = 0
        self.disagreements = 0

    def look(
        self,
        loads: Int[np.ndarray, "layers steps experts"],
        slots: Int[np.ndarray, "layers physical"],
        ranks: int,
    ) -> None:
        """The placement as it is, under the counts just read."""
        self.before = self.now = imbalance(loads, slots, ranks)

    def rearranged(
        self,
        loads: Int[np.ndarray, "layers steps experts"],
        slots: Int[np.ndarray, "layers physical"],
        ranks: int,
        moved: int,
    ) -> None:
        """All layers have moved; `before` stays what `look` found."""
        self.now = imbalance(loads, slots, ranks)
        self.moved(moved)

    def moved(self, slots: int) -> None:
        self.version += 1
        self.rearrangements += 1
        self.slots_moved += slots

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `stats()`."""
        return {
            "placement_version": self.version,
            "rearrangements": self.rearrangements,
            "slots_moved": self.slots_moved,
            "disagreements": self.disagreements,
            "imbalance_before": self.before.round(4).tolist(),
            "imbalance": self.now.round(4).tolist(),
        }

    def line(self) -> str:
        """Means and worst layers, before and after."""
        return (
            f"max/mean of ranks {self.before.mean():.2f} (worst layer {self.before.max():.2f}) ->"
            f" {self.now.mean():.2f} ({self.now.max():.2f}), placement {self.version},"
            f" {self.slots_moved} slots moved so far"
        )

    def table(self) -> str:
        """A line per layer."""
        rows = [
            f"{layer:>5} {before:>8.3f} {now:>8.3f}"
            for layer, (before, now) in enumerate(zip(self.before, self.now, strict=True))
        ]
        return "\n".join(["layer   before      now", *rows])
