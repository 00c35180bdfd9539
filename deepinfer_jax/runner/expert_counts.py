"""Tokens per expert of the last steps, counted on the device inside the step programs.

Each rank keeps its own counts; they are summed over the ranks only when somebody reads them, so a
step exchanges nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertCounts:
    """A ring of the counts of one rank. ring: 0 in steps that have not been; place: where the next
    step goes. All ranks take every step, so a row is the same step on all of them."""

    ring: Int[Array, "steps layers experts"]
    place: Int[Array, " 1"]

    @classmethod
    def init(cls, steps: int, layers: int, experts: int) -> ExpertCounts:
        return cls(jnp.zeros((steps, layers, experts), jnp.int32), jnp.zeros(1, jnp.int32))

    def add(self, loads: Int[Array, "layers experts"]) -> ExpertCounts:
        """One step's tokens in place of the oldest ones."""
        place = self.place[0]
        ring = jax.lax.dynamic_update_slice_in_dim(self.ring, loads[None], place, 0)
        return ExpertCounts(ring, (self.place + 1) % self.ring.shape[0])
