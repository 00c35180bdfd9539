"""Expert balance as arithmetic: from tokens per expert and step to a place for every expert.

A step waits for its most loaded rank, so what counts is the sum over steps of the largest rank
load, not the largest sum: two experts that are busy at different times may share a rank. Greedy,
in two moves, for all layers at once:

1. replicate: the next redundant slot goes to the expert whose further replica most lowers the sum
   over steps of the largest load of a replica;
2. place: replicas in descending load, each to the rank with a free slot that keeps the sum over
   steps of the largest rank load lowest.

Hierarchical: whole groups of experts go to nodes first (step 2 with nodes as ranks), then each
node replicates and places its own. A router that limits a token to a few groups then sends it to
few nodes.

Nothing is drawn at random: on one machine the same loads give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

Policy = Callable[..., Int[np.ndarray, "layers physical"]]
"""Of the signature of `balance`."""
TIE = 1e-7
"""Weight of the second criterion, in a sum with the first: it only separates equals."""
LAYERS_AT_ONCE = 16
"""Layers placed together: few calls of NumPy, and arrays that a core's cache holds."""


@dataclass(frozen=True)
class RankLayout:
    """ranks: of the expert-parallel group. nodes: equal runs of ranks that `groups`, equal runs of
    experts, must not leave; 1 node: no such limit."""

    ranks: int
    nodes: int = 1
    groups: int = 1

    def check(self, num_experts: int, num_physical: int) -> None:
        """ValueError when a number does not divide as it must."""
        for what, number, parts in (
            ("physical experts over ranks", num_physical, self.ranks),
            ("ranks over nodes", self.ranks, self.nodes),
            ("expert groups over nodes", self.groups, self.nodes),
            ("experts over groups", num_experts, self.groups),
        ):
            if number < parts or number % parts:
                raise ValueError(f"{what}: {number} cannot be shared out evenly over {parts}")
        if num_physical < num_experts:
            raise ValueError(f"{num_experts} experts do not fit in {num_physical} slots")


def balance(
    loads: Int[np.ndarray, "layers steps experts"],
    num_physical: int,
    layout: RankLayout,
    current: Int[np.ndarray, "layers physical"] | None = None,
) -> Int[np.ndarray, "layers physical"]:
    """The expert of every physical slot; slot p is on rank p // (num_physical / ranks).

    loads: tokens that chose an expert. current: what the slots hold now; ranks and slots are then
    named so that as few experts as possible move. ValueError for numbers that do not divide.
    """
    if not loads.shape[1]:  # nothing counted yet: as good as one step without tokens
        loads = np.zeros((loads.shape[0], 1, loads.shape[2]), np.int32)
    layers, steps, experts = loads.shape
    layout.check(experts, num_physical)
    by_node = _experts_of_nodes(loads, layout)  # [layers, nodes, experts / nodes]
    nodes = layout.nodes
    parts = np.take_along_axis(loads, by_node.reshape(layers, 1, -1), 2)
    parts = parts.reshape(layers, steps, nodes, -1).swapaxes(1, 2)
    local = _balance_node(
        parts.reshape(layers * nodes, steps, -1), num_physical // nodes, layout.ranks // nodes
    )
    slots = np.take_along_axis(by_node, local.reshape(layers, nodes, -1), 2)
    slots = slots.reshape(layers, num_physical).astype(np.int32)
    return slots if current is None else keep_in_place(slots, current, layout)


def _experts_of_nodes(
    loads: Int[np.ndarray, "layers steps experts"], layout: RankLayout
) -> Int[np.ndarray, "layers nodes share"]:
    """The experts of each node: groups, placed as if they were replicas and nodes ranks."""
    layers, steps, experts = loads.shape
    if layout.nodes == 1:
        return np.broadcast_to(np.arange(experts), (layers, 1, experts))
    size = experts // layout.groups
    by_group = loads.reshape(layers, steps, layout.groups, size).sum(-1)
    groups = np.argsort(place(by_group, layout.nodes), axis=1, kind="stable")  # node by node
    return (groups[..., None] * size + np.arange(size)).reshape(layers, layout.nodes, -1)


def _balance_node(
    loads: Int[np.ndarray, "layers steps experts"], num_physical: int, ranks: int
) -> Int[np.ndarray, "layers physical"]:
    counts = replicate(loads, num_physical)
    experts = np.stack([np.repeat(np.arange(c.size), c) for c in counts])
    per_replica = loads / counts[:, None, :]
    items = np.take_along_axis(per_replica, experts[:, None, :], 2)
    by_rank = np.argsort(place(items, ranks), axis=1, kind="stable")
    return np.take_along_axis(experts, by_rank, 1)


def replicate(
    loads: Int[np.ndarray, "layers steps experts"], num_physical: int
) -> Int[np.ndarray, "layers experts"]:
    """How many replicas each expert gets: at least 1, num_physical per layer.

    Where no single replica helps (two experts tie), the largest total load per replica decides,
    then the lower id.
    """
    layers, _, experts = loads.shape
    counts = np.ones((layers, experts), np.int64)
    totals = loads.sum(1, dtype=np.float64) + 1e-3  # unused experts share what is left evenly
    per = np.ascontiguousarray(loads, np.float32)
    every = np.arange(layers)
    top, first, second = _two_largest(per)
    for _ in range(num_physical - experts):
        counts_of_first = np.take_along_axis(counts, first, 1)
        lowered = top * counts_of_first / (counts_of_first + 1)
        gain = top - np.maximum(lowered, np.take_along_axis(per, second[..., None], 2)[..., 0])
        key = TIE * totals / counts + _sum_by_expert(gain, first, experts)
        chosen = key.argmax(1)
        held = counts[every, chosen]
        counts[every, chosen] = held + 1
        column = per[every, :, chosen] * (held / (held + 1))[:, None].astype(np.float32)
        per[every, :, chosen] = column
        stale = (first == chosen[:, None]) | (second == chosen[:, None])
        top[stale], first[stale], second[stale] = _two_largest(per[stale])
    return counts


def _two_largest(per: Float[np.ndarray, "*rows experts"]) -> tuple[np.ndarray, ...]:
    """(largest value, its index, index of the second largest) of each row; the lower index wins a
    tie. A row of one expert names it twice."""
    first = per.argmax(-1)
    at = first[..., None]
    top = np.take_along_axis(per, at, -1)[..., 0].astype(np.float64)
    np.put_along_axis(per, at, -1.0, -1)
    second = per.argmax(-1)
    np.put_along_axis(per, at, top[..., None], -1)
    return top, first, second


def _sum_by_expert(
    values: Float[np.ndarray, "layers steps"], expert: Int[np.ndarray, "layers steps"], count: int
) -> Float[np.ndarray, "layers experts"]:
    layers = values.shape[0]
    index = expert + count * np.arange(layers)[:, None]
    return np.bincount(index.ravel(), values.ravel(), layers * count).reshape(layers, count)


def place(
    loads: Float[np.ndarray, "layers steps items"], ranks: int
) -> Int[np.ndarray, "layers items"]:
    """The rank of each item, items / ranks on every one.

    Among ranks that leave the sum over steps of the largest rank load equal, the one with the
    smallest total load gets the item, then the lower one.
    """
    by_item = np.ascontiguousarray(loads.swapaxes(1, 2), np.float32)
    order = np.argsort(-by_item.sum(2, dtype=np.float64), axis=1, kind="stable")
    parts = range(0, len(order), LAYERS_AT_ONCE)
    return np.concatenate(
        [
            _place(by_item[at : at + LAYERS_AT_ONCE], order[at : at + LAYERS_AT_ONCE], ranks)
            for at in parts
        ]
    )


def _place(
    loads: Float[np.ndarray, "layers items steps"],
    order: Int[np.ndarray, "layers items"],
    ranks: int,
) -> Int[np.ndarray, "layers items"]:
    layers, items, steps = loads.shape
    held = np.zeros((layers, ranks, steps), np.float32)
    largest = np.zeros((layers, 1, steps), np.float32)
    free = np.full((layers, ranks), items // ranks)
    totals = np.zeros((layers, ranks), np.float32)
    where, every, after = np.zeros((layers, items), np.int64), np.arange(layers), held.copy()
    for item in order.T:
        load = loads[every, item][:, None, :]
        np.add(held, load, out=after)
        np.maximum(after, largest, out=after)
        cost = after.sum(2) + np.float64(TIE) * totals
        rank = np.where(free > 0, cost, np.inf).argmin(1)
        where[every, item] = rank
        held[every, rank] += load[:, 0]
        largest[:, 0] = after[every, rank]
        totals[every, rank] += load[:, 0].sum(1)
        free[every, rank] -= 1
    return where


def keep_in_place(
    slots: Int[np.ndarray, "layers physical"],
    current: Int[np.ndarray, "layers physical"],
    layout: RankLayout,
) -> Int[np.ndarray, "layers physical"]:
    """The same sets of experts, given to the ranks (of the same node) and slots that hold most of
    them now."""
    layers, physical = slots.shape
    units, ranks = layers * layout.nodes, layout.ranks // layout.nodes
    new = slots.reshape(units, ranks, -1)
    old = current.reshape(units, ranks, -1)
    new = np.take_along_axis(new, _nearest_ranks(new, old)[..., None], 1)
    return _same_slots(new, old).reshape(layers, physical).astype(np.int32)


def _nearest_ranks(
    new: Int[np.ndarray, "units ranks share"], old: Int[np.ndarray, "units ranks share"]
) -> Int[np.ndarray, "units ranks"]:
    """For each rank, which of the new sets it should hold: greedily the pair that shares most."""
    units, ranks, _ = new.shape
    holders = np.zeros((units, int(max(new.max(), old.max())) + 1, ranks), np.int16)
    np.put_along_axis(
        holders.swapaxes(1, 2), new, 1, 2
    )  # holders[u, e, r]: whether new set r has expert e
    shared = np.take_along_axis(holders, old.reshape(units, -1, 1), 1)
    shared = shared.reshape(units, ranks, -1, ranks).sum(2)
    every, chosen = np.arange(units), np.zeros((units, ranks), np.int64)
    for _ in range(ranks):
        rank, part = np.divmod(shared.reshape(units, -1).argmax(1), ranks)
        chosen[every, rank] = part
        shared[every, rank, :] = -1
        shared[every, :, part] = -1
    return chosen


def _same_slots(
    new: Int[np.ndarray, "units ranks share"], old: Int[np.ndarray, "units ranks share"]
) -> Int[np.ndarray, "units ranks share"]:
    """The order of each new set in which an expert that stays keeps its slot."""
    left, out = new.copy(), np.full_like(new, -1)
    for slot in range(old.shape[2]):
        same = left == old[:, :, slot : slot + 1]
        found = same.any(2)
        at = same.argmax(2)
        out[found, slot] = old[found, slot]
        left[found, at[found]] = -1
    out[out < 0] = left[left >= 0]  # both hold the rest of each set, in order of unit and rank
    return out


def rank_loads(
    loads: Int[np.ndarray, "layers steps experts"],
    slots: Int[np.ndarray, "layers physical"],
    ranks: int,
) -> Float[np.ndarray, "layers steps ranks"]:
    """Tokens that each rank computes, an expert's replicas sharing its tokens evenly."""
    layers, steps, experts = loads.shape
    counts = replica_counts(slots, experts)
    per_slot = np.take_along_axis(loads / counts[:, None, :], slots[:, None, :], 2)
    return per_slot.reshape(layers, steps, ranks, -1).sum(-1)


def replica_counts(
    slots: Int[np.ndarray, "layers physical"], experts: int
) -> Int[np.ndarray, "layers experts"]:
    index = slots + experts * np.arange(len(slots))[:, None]
    return np.bincount(index.ravel(), minlength=slots.shape[0] * experts).reshape(-1, experts)


def imbalance(
    loads: Int[np.ndarray, "layers steps experts"],
    slots: Int[np.ndarray, "layers physical"],
    ranks: int,
) -> Float[np.ndarray, " layers"]:
    """Per layer, tokens of the most loaded rank of each step over those of the mean rank: 1 is
    perfect, `ranks` the worst. Steps count by their tokens; 1 where there are none."""
    by_rank = rank_loads(loads, slots, ranks)
    mean = by_rank.mean(2).sum(1)
    return np.where(mean > 0, by_rank.max(2).sum(1) / np.maximum(mean, 1e-300), 1.0)
