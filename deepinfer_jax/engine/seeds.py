"""Seeds for requests that bring none."""

from __future__ import annotations

from typing import Any

import numpy as np


class SeedSource:
    """A reproducible stream of 64-bit seeds; seed None: another stream each time."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)

    def draw(self) -> int:
        return int(self._generator.integers(0, 2**64, dtype=np.uint64))

    @property
    def state(self) -> dict[str, Any]:
        """Plain values; set to go on where they were taken."""
        return self._generator.bit_generator.state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state
