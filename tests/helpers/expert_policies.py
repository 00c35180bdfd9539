"""What the balance policy is compared with: two simpler policies, and the optimum by trying all."""

from __future__ import annotations

import itertools

import numpy as np

from deepinfer_jax.experts.policy import imbalance


def in_turn(loads: np.ndarray, num_physical: int, ranks: int) -> np.ndarray:
    """Sorted by total load and dealt out to the ranks, back and forth; the busiest experts get the
    redundant slots, one each."""
    experts, share = loads.shape[2], num_physical // ranks
    slots = []
    for total in loads.sum(1):
        order = np.argsort(-total, kind="stable")
        extra = order[np.arange(num_physical - experts) % experts]
        items = np.concatenate([order, extra])
        counts = np.bincount(items, minlength=experts)
        items = items[np.argsort(-(total / counts)[items], kind="stable")]
        rows = items.reshape(share, ranks).copy()
        rows[1::2] = rows[1::2, ::-1]
        slots.append(rows.T.reshape(-1))
    return np.array(slots)


def by_total(loads: np.ndarray, num_physical: int, ranks: int) -> np.ndarray:
    """Greedy on loads summed over steps: a replica to the expert with the most per replica, then
    each, in descending load, to the rank with the least."""
    slots = []
    for total in loads.sum(1):
        counts = np.ones(total.size, int)
        for _ in range(num_physical - total.size):
            counts[(total / counts).argmax()] += 1
        items = np.repeat(np.arange(total.size), counts)
        per = (total / counts)[items]
        held, sets = np.zeros(ranks), [[] for _ in range(ranks)]
        for item in np.argsort(-per, kind="stable"):
            full = np.array([len(s) * ranks == num_physical for s in sets])
            rank = np.where(full, np.inf, held).argmin()
            held[rank] += per[item]
            sets[rank].append(items[item])
        slots.append(np.concatenate(sets))
    return np.array(slots)


def optimum(loads: np.ndarray, num_physical: int, ranks: int) -> float:
    """The least possible imbalance of one layer [steps, experts], over all replica counts and all
    placements. For a handful of slots only."""
    experts = loads.shape[1]
    best = np.inf
    for extra in itertools.combinations_with_replacement(range(experts), num_physical - experts):
        items = sorted([*range(experts), *extra])
        tried = {tuple(map(tuple, sets)) for sets in _partitions(items, num_physical // ranks)}
        slots = np.array([np.concatenate(sets) for sets in tried])
        same = np.broadcast_to(loads, (len(slots), *loads.shape))
        best = min(best, imbalance(same, slots, ranks).min())
    return float(best)


def _partitions(items: list[int], share: int):
    """All ways to split a list into unordered sets of `share`."""
    if not items:
        yield []
        return
    for others in itertools.combinations(range(1, len(items)), share - 1):
        rest = [x for i, x in enumerate(items) if i and i not in others]
        for sets in _partitions(rest, share):
            yield [[items[0], *(items[i] for i in others)], *sets]


def skewed_loads(
    rng: np.random.Generator,
    layers: int,
    steps: int,
    experts: int,
    tokens: int,
    top_k: int,
    exponent: float = 1.0,
) -> np.ndarray:
    """i32 [layers, steps, experts]: experts drawn by Zipf's law, in an order of its own per layer,
    whose weights drift from step to step by a factor around 1."""
    out = np.zeros((layers, steps, experts), np.int32)
    for layer in out:
        share = rng.permutation(np.arange(1, experts + 1) ** -exponent)
        drift = share * rng.gamma(5, 1 / 5, (steps, experts))
        mean = tokens * top_k * drift / drift.sum(1, keepdims=True)
        layer[...] = np.minimum(rng.poisson(mean), tokens)
    return out
