"""Routers against a plain-loop float64 reference, their group limits, ties and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax.models.layers.router import RouterConfig, route


def reference(logits, bias, c: RouterConfig):
    """One row at a time, sorting with explicit (score, id) keys."""
    rows = []
    for row in np.asarray(logits, np.float64):
        scores = (
            np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if c.scoring == "softmax"
            else 1 / (1 + np.exp(-row))
        )
        choice = scores + (0 if bias is None else np.asarray(bias, np.float64))
        size = c.num_experts // c.num_groups
        if c.topk_groups < c.num_groups:
            rank = []
            for g in range(c.num_groups):
                best = sorted(choice[g * size : (g + 1) * size], reverse=True)
                rank.append(best[0] if c.group_score == "max" else best[0] + best[1])
            kept = sorted(range(c.num_groups), key=lambda g: (-rank[g], g))[: c.topk_groups]
            allowed = [e for e in range(c.num_experts) if e // size in kept]
        else:
            allowed = range(c.num_experts)
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: c.top_k]
        w = scores[chosen]
        if c.normalize:
            w = w / (w.sum() + c.normalize_eps)
        rows.append((chosen, w * c.scale))
    return np.array([r[1] for r in rows]), np.array([r[0] for r in rows])


CONFIGS = [
    RouterConfig(16, 4),
    RouterConfig(16, 4, normalize=True),
    RouterConfig(16, 3, num_groups=4, topk_groups=2, group_score="max", scale=16.0),
    RouterConfig(16, 3, "sigmoid", True, 4, 2, "top2", True, 1e-20, 2.5),
    RouterConfig(16, 3, "sigmoid", True, 4, 2, "top2", False, 1e-20, 2.5),
    RouterConfig(16, 6, "sigmoid", True, 1, 1, "top2", True, 1e-20, 2.827),
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.scoring}-{c.num_groups}-{c.normalize}-{c.top_k}"
)
def test_matches_the_reference(config):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 16)).astype(np.float32)
    bias = (0.3 * rng.normal(size=16)).astype(np.float32) if config.bias else None
    weights, experts = route(logits, bias, config)
    want_weights, want_experts = reference(logits, bias, config)
    np.testing.assert_array_equal(experts, want_experts)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)


def test_ties_go_to_the_lower_id():
    for config in (RouterConfig(8, 3), RouterConfig(8, 3, "sigmoid", False, 4, 2, "top2")):
        experts = np.asarray(route(np.zeros((2, 8), np.float32), None, config)[1])
        np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)
    tied = np.array([[0.0, 2, 1, 2, 1, 2, 0, 1]], np.float32)
    np.testing.assert_array_equal(route(tied, None, RouterConfig(8, 4))[1], [[1, 3, 5, 2]])


def test_the_correction_bias_chooses_but_does_not_weigh():
    logits = np.array([[4.0, 0.0, 0.0, 0.0]], np.float32)
    config = RouterConfig(4, 1, "sigmoid", True)
    weights, experts = route(logits, np.array([0, 0, 5.0, 0], np.float32), config)
    assert experts.tolist() == [[2]] and weights.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"scoring": "tanh"}, "scoring"),
        ({"top_k": 9}, "top_k"),
        ({"num_groups": 3}, "3 groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups"),
        ({"num_groups": 4, "topk_groups": 1, "top_k": 3}, "exceeds the 2 experts"),
        ({"num_groups": 8, "topk_groups": 4, "group_score": "top2"}, "two best"),
        ({"group_score": "mean"}, "group_score"),
    ],
)
def test_impossible_configurations_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**({"num_experts": 8, "top_k": 2} | args))


def test_experts_outside_the_kept_groups_count_as_zero_with_group_score_max():
    """As DeepSeek-V2 fills them: where scores underflow to 0 the tie goes to the lower id, kept
    group or not."""
    logits = np.array([[-200.0, -200.0, 300.0, -200.0]], np.float32)
    config = RouterConfig(4, 2, num_groups=2, topk_groups=1, group_score="max")
    weights, experts = route(logits, None, config)
    assert experts.tolist() == [[2, 0]] and weights.tolist() == [[1.0, 0.0]]


def test_experts_outside_the_kept_groups_are_never_chosen_with_group_score_top2():
    """Whatever the sign of scores plus bias."""
    config = RouterConfig(16, 3, "sigmoid", True, 4, 1, "top2", True, 1e-20, 2.5)
    logits = np.random.default_rng(4).normal(size=(64, 16)).astype(np.float32)
    bias = np.full(16, -3.0, np.float32)
    weights, experts = route(logits, bias, config)
    want_weights, want_experts = reference(logits, bias, config)
    np.testing.assert_array_equal(experts, want_experts)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)


def test_weights_stay_finite_where_all_scores_underflow():
    config = RouterConfig(4, 2, "sigmoid", normalize=True, normalize_eps=1e-20)
    weights, _ = route(np.full((1, 4), -200.0, np.float32), None, config)
    assert np.asarray(weights).tolist() == [[0.0, 0.0]]
