"""The balance policy against brute force, two simpler policies, and what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from expert_policies import by_total, in_turn, optimum, skewed_loads
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.experts.policy import (
    RankLayout,
    balance,
    imbalance,
    keep_in_place,
    place,
    rank_loads,
    replica_counts,
    replicate,
)


def naive_imbalance(loads, slots, ranks):
    """Counted slot by slot, in Python."""
    ratios = []
    for layer, layer_slots in zip(loads, slots, strict=True):
        largest = total = 0.0
        for step in layer:
            by_rank = [0.0] * ranks
            for p, e in enumerate(layer_slots):
                by_rank[p * ranks // len(layer_slots)] += step[e] / list(layer_slots).count(e)
            largest, total = largest + max(by_rank), total + sum(by_rank)
        ratios.append(largest * ranks / total)
    return ratios


def greedy_counts(loads, num_physical):
    """Every candidate replica tried, one layer."""
    counts = np.ones(loads.shape[1])
    for _ in range(num_physical - loads.shape[1]):
        tried = counts + np.eye(loads.shape[1])
        counts = tried[(loads / tried[:, None]).max(2).sum(1).argmin()]
    return counts


def test_imbalance_equals_a_count_slot_by_slot():
    rng = np.random.default_rng(0)
    loads = skewed_loads(rng, 3, 5, 6, 50, 2)
    slots = balance(loads, 8, RankLayout(4))
    np.testing.assert_allclose(imbalance(loads, slots, 4), naive_imbalance(loads, slots, 4))
    np.testing.assert_allclose(rank_loads(loads, slots, 4).sum(2), loads.sum(2))


def test_replicas_are_those_of_trying_every_candidate():
    rng = np.random.default_rng(1)
    loads = skewed_loads(rng, 6, 20, 16, 4096, 4)
    expected = [greedy_counts(layer, 24) for layer in loads]
    np.testing.assert_array_equal(replicate(loads, 24), expected)


def test_replicas_count_busy_steps_rather_than_the_sum():
    """Expert 0 has the largest total, but is never what a step waits for."""
    loads = np.array([[[60, 100, 0, 0], [60, 0, 100, 0], [60, 100, 0, 0]]])
    np.testing.assert_array_equal(replicate(loads, 5), [[1, 2, 1, 1]])


def test_experts_that_no_token_chose_share_the_redundant_slots():
    assert replicate(np.zeros((1, 3, 4), int), 8).tolist() == [[2, 2, 2, 2]]


def test_placement_keeps_experts_apart_that_are_busy_at_the_same_time():
    loads = np.array([[[90, 90, 10, 10], [10, 10, 80, 80]]], float)
    ranks = place(loads, 2)[0]
    assert ranks[0] != ranks[1] and ranks[2] != ranks[3]


@pytest.mark.parametrize("experts, physical, ranks", [(4, 6, 3), (5, 8, 4), (6, 8, 2), (6, 9, 3)])
def test_close_to_the_optimum_on_small_cases(experts, physical, ranks):
    """benchmarks/eplb.py prints the distance over many cases: 2 to 9 % on average."""
    rng = np.random.default_rng(2)
    ratios = []
    for _ in range(8):
        loads = skewed_loads(rng, 1, 6, experts, 64, 2)
        ours = imbalance(loads, balance(loads, physical, RankLayout(ranks)), ranks)[0]
        ratios.append(ours / optimum(loads[0], physical, ranks))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.12


@pytest.mark.parametrize(
    "experts, physical, ranks, exponent", [(256, 320, 64, 0.5), (64, 72, 8, 1.0)]
)
def test_better_than_two_simpler_policies_on_skewed_loads(experts, physical, ranks, exponent):
    loads = skewed_loads(np.random.default_rng(3), 2, 100, experts, 4096, 8, exponent)
    ours = imbalance(loads, balance(loads, physical, RankLayout(ranks)), ranks)
    assert (ours < imbalance(loads, by_total(loads, physical, ranks), ranks)).all()
    assert (ours < imbalance(loads, in_turn(loads, physical, ranks), ranks)).all()


def test_groups_stay_in_their_node():
    loads = skewed_loads(np.random.default_rng(4), 3, 10, 16, 512, 4)
    layout = RankLayout(ranks=8, nodes=4, groups=8)
    slots = balance(loads, 24, layout)
    for layer in slots.reshape(3, 4, 6):
        nodes_of_group = [{n for n in range(4) if (layer[n] // 2 == g).any()} for g in range(8)]
        assert all(len(nodes) == 1 for nodes in nodes_of_group)
    current = slots.reshape(3, 4, 2, 3)[:, :, ::-1].reshape(3, 24)  # ranks of a node swapped
    np.testing.assert_array_equal(keep_in_place(slots, current, layout), current)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (2, 2), (2, 4)]), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_every_expert_has_a_slot_and_keeping_changes_no_set(seed, nodes_groups, extra):
    rng = np.random.default_rng(seed)
    nodes, groups = nodes_groups
    layout = RankLayout(4, nodes, groups)
    loads = rng.integers(0, 100, (2, 3, 8)) * (rng.random((2, 3, 8)) < 0.7)
    physical = 8 + 4 * extra
    slots = balance(loads, physical, layout)
    assert (replica_counts(slots, 8) >= 1).all()
    current = rng.permuted(np.resize(np.arange(8), (2, physical)), axis=1)
    kept = keep_in_place(slots, current, layout)
    by_node = (np.sort(x.reshape(2, nodes, -1), axis=2) for x in (slots, kept))
    np.testing.assert_array_equal(*by_node)
    np.testing.assert_allclose(
        np.sort(rank_loads(loads, slots, 4)), np.sort(rank_loads(loads, kept, 4))
    )
    np.testing.assert_array_equal(keep_in_place(kept, kept, layout), kept)


def test_the_same_loads_move_nothing_and_similar_ones_less_than_a_fresh_start():
    rng = np.random.default_rng(5)
    loads, layout = skewed_loads(rng, 2, 50, 64, 4096, 6), RankLayout(8)
    fresh = balance(loads, 72, layout)
    current = fresh.reshape(2, 8, 9)[:, rng.permutation(8)].reshape(2, 72)
    np.testing.assert_array_equal(balance(loads, 72, layout, current), current)
    later = loads + rng.integers(0, 20, loads.shape)
    moved = (balance(later, 72, layout, current) != current).sum()
    assert moved < (balance(later, 72, layout) != current).sum()


@pytest.mark.parametrize(
    "physical, layout, words",
    [
        (9, RankLayout(4), "physical experts over ranks: 9 cannot be shared out evenly over 4"),
        (8, RankLayout(4, 3), "ranks over nodes: 4 cannot"),
        (8, RankLayout(4, 2, 1), "expert groups over nodes: 1 cannot"),
        (8, RankLayout(4, 2, 6), "experts over groups: 8 cannot"),
        (4, RankLayout(4), "8 experts do not fit in 4 slots"),
    ],
)
def test_numbers_that_do_not_divide_are_named(physical, layout, words):
    with pytest.raises(ValueError, match=words):
        balance(np.ones((1, 1, 8), int), physical, layout)
