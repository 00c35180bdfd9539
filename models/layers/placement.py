"""Where experts live: physical expert slots, their logical experts, and which replica a token uses.

Placement is data. Every table has a shape fixed by (experts, physical slots), so moving experts
between ranks, or giving a busy expert more replicas, changes array contents only and never
recompiles a step. Physical slot p lives on rank `p // (num_physical / ep)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

REPLICA_STRIDE = 23333
"""Odd and far from any power of two: consecutive tokens of a rank walk evenly through an expert's
replicas."""


@dataclass(frozen=True)
class Placement:
    """Host tables of one layer.

    physical_to_logical: the logical expert that each physical slot holds.
    logical_to_physical: the slots of each expert, of which the first `replica_count` count;
    P - E + 1 is the most that one can have.
    replica_count: at least 1.
    """

    physical_to_logical: Int[np.ndarray, " physical"]
    logical_to_physical: Int[np.ndarray, "experts most"]
    replica_count: Int[np.ndarray, " experts"]


def num_physical_experts(num_experts: int, ep: int, extra: int = 0) -> int:
    """`num_experts + extra`, raised to a multiple of ep."""
    if extra < 0:
        raise ValueError(f"extra experts must be >= 0, got {extra}")
    return -(-(num_experts + extra) // ep) * ep


def initial_physical_to_logical(
    num_experts: int, num_physical: int
) -> Int[np.ndarray, " physical"]:
    """The layout weights are loaded in: slot i holds expert i, and the extra slots start again at
    expert 0."""
    return (np.arange(num_physical) % num_experts).astype(np.int32)


def make_placement(
    physical_to_logical: Int[np.ndarray, " physical"], num_experts: int
) -> Placement:
    """The three tables from one. ValueError when an id is out of range or an expert has no slot."""
    p2l = np.asarray(physical_to_logical, np.int32)
    if p2l.ndim != 1 or p2l.min(initial=0) < 0 or p2l.max(initial=0) >= num_experts:
        raise ValueError(
            f"physical_to_logical must be 1-D with ids in 0..{num_experts - 1}, got shape"
            f" {p2l.shape}"
        )
    count = np.bincount(p2l, minlength=num_experts).astype(np.int32)
    if (count == 0).any():
        raise ValueError(f"experts without a physical slot: {np.flatnonzero(count == 0).tolist()}")
    table = np.zeros((num_experts, len(p2l) - num_experts + 1), np.int32)
    filled = np.zeros(num_experts, np.int64)
    for slot, expert in enumerate(p2l):
        table[expert, filled[expert]] = slot
        filled[expert] += 1
    return Placement(p2l, table, count)


def physical_ids(
    experts: Int[Array, "tokens k"],
    logical_to_physical: Int[Array, "experts most"],
    replica_count: Int[Array, " experts"],
    rank: Int[Array, ""] | int,
) -> Int[Array, "tokens k"]:
    """Logical experts -> physical slots; -1, no expert, stays.

    Token t of rank r uses replica `(r + t * 23333) mod replica_count`, so one expert's load spreads
    over its replicas without any exchange between ranks.
    """
    if logical_to_physical.shape[1] == 1:  # no replicas possible: the table is a permutation
        chosen = logical_to_physical[experts, 0]
    else:
        token = jnp.arange(experts.shape[0], dtype=jnp.uint32)[:, None]
        turn = jnp.asarray(rank).astype(jnp.uint32) + token * jnp.uint32(REPLICA_STRIDE)
        replica = (turn % replica_count[experts].astype(jnp.uint32)).astype(jnp.int32)
        chosen = logical_to_physical[experts, replica]
    return jnp.where(experts >= 0, chosen, -1)


def expert_load(experts: Int[Array, "tokens k"], num_experts: int) -> Int[Array, " experts"]:
    """How many tokens each logical expert was chosen by. Entries of -1 do not count."""
    return (
        jnp.zeros(num_experts, jnp.int32)
        .at[experts.reshape(-1)]
        .add(1, mode="drop", wrap_negative_indices=False)
    )
