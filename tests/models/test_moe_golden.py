"""DeepSeek and Qwen3-MoE against Hugging Face's logits and greedy tokens, on one device and on
meshes of eight.

The fixtures are made by tests/golden/make_golden.py and make_golden_moe.py.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import step_batches

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.placement import make_placement
from deepinfer_jax.models.loading import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
LARGE = ("deepseek_v2_lite", "deepseek_v3", "deepseek_v3_yarn", "qwen3_moe")
SMALL = ("deepseek_v2_groups", "deepseek_v3_halves", "qwen3_moe_sparse")
MESHES = ((2, 2), (4, 4), (8, 8), (8, 4))
TOLERANCE = 5e-4


def golden(name: str) -> list[dict[str, np.ndarray]]:
    with np.load(GOLDEN / name / "golden.npz") as z:
        count = sum(key.startswith("prompt_") for key in z)
        return [
            {key: z[f"{key}_{i}"] for key in ("prompt", "logits", "greedy")} for i in range(count)
        ]


def driver(
    name: str, dp: int = 1, ep: int = 1, tp: int = 1, options: MoeOptions | None = None, **overrides
):
    axes = ParallelAxes(dp=dp, ep=ep, tp=tp)
    mesh = step_batches.make_mesh(axes)
    overrides |= {} if options is None else {"moe": options}
    loaded = load_model(
        GOLDEN / name, dtype="float32", mesh=mesh, axes=axes, config_overrides=overrides
    )
    return step_batches.Driver(loaded, axes, mesh, num_blocks=48)


def spread(cases: list, dp: int) -> list[list[int]]:
    """Which prompts each rank has: uneven, with ranks that have none, and one prompt on several
    ranks when there are many."""
    ranks = [[] for _ in range(dp)]
    for i in range(len(cases)):
        ranks[(i * i) % dp].append(i)
    for rank in range(5, dp):
        ranks[rank] += [rank % len(cases)] if rank % 2 else []
    return ranks


def run(d, cases: list, ranks: list[list[int]], steps: int) -> None:
    """Prefills every rank's prompts in one packed step, then decodes greedily; checks logits and
    tokens on the way."""
    rows = max(sum(len(cases[i]["prompt"]) for i in own) for own in ranks) + 3
    seqs = max(map(len, ranks)) + 1
    logits = d.step([[(i, cases[i]["prompt"]) for i in own] for own in ranks], rows, seqs)
    last = []
    for own, out in zip(ranks, logits, strict=True):
        at, tokens = 0, {}
        for i in own:
            n = len(cases[i]["prompt"])
            np.testing.assert_allclose(out[at : at + n], cases[i]["logits"], atol=TOLERANCE)
            tokens[i] = int(out[at + n - 1].argmax())
            at += n
        last.append(tokens)
    for step in range(steps):
        for tokens in last:
            for i, token in tokens.items():
                assert token == cases[i]["greedy"][step], f"prompt {i}, token {step}"
        work = [[(i, np.array([t], np.int32)) for i, t in tokens.items()] for tokens in last]
        logits = d.step(work, seqs, seqs, decode=True)
        last = [
            {i: int(out[s].argmax()) for s, i in enumerate(tokens)}
            for out, tokens in zip(logits, last, strict=True)
        ]


@pytest.mark.parametrize("name", LARGE + SMALL)
def test_one_device(name):
    cases = golden(name)
    d = driver(name)
    run(d, cases, [list(range(len(cases)))], len(cases[0]["greedy"]) - 1)
    assert d.traces == 2, "one program for prefill, one for decode"


@pytest.mark.parametrize(
    ("name", "dp", "ep"),
    [(n, *m) for n in LARGE for m in (MESHES[-1:] if n.endswith("yarn") else MESHES)],
)
def test_meshes_with_uneven_loads_and_idle_ranks(name, dp, ep):
    cases = golden(name)
    run(driver(name, dp, ep), cases, spread(cases, dp), 6)


@pytest.mark.parametrize("name", SMALL)
def test_experts_that_do_not_divide_by_the_ranks(name):
    """12 and 10 experts on 8 ranks: the physical count is raised, so some experts get a replica."""
    cases = golden(name)
    d = driver(name, 8, 8)
    assert d.loaded.config.router.num_experts % 8 and d.loaded.config.moe.extra_experts == 0
    run(d, cases, spread(cases, 8), 0)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [MoeOptions(extra_experts=8), MoeOptions(capacity_factor=0.5, extra_experts=3)],
    ids=["twice", "small-cap"],
)
def test_replicas_do_not_change_the_output(name, options):
    cases = golden(name)
    run(driver(name, 8, 4, options=options), cases, spread(cases, 8), 0)


def test_rearranging_experts_compiles_nothing_and_changes_nothing():
    cases = golden("deepseek_v3")
    d = driver("deepseek_v3", 4, 4, options=MoeOptions(extra_experts=4))
    work = [[(i, cases[i]["prompt"])] for i in range(4)]
    before = d.step(work, 70, 2)
    rng, params = np.random.default_rng(1), d.loaded.params
    for layer in (1, 2):
        mlp = params["layers"][layer]["mlp"]
        old = np.asarray(mlp["placement"]["physical_to_logical"])
        new = rng.permutation(np.concatenate([np.arange(8), [3, 3, 5, 3]]))
        slot_of = [int(np.flatnonzero(old == e)[0]) for e in new]
        for key, value in mlp["experts"].items():
            mlp["experts"][key] = jax.device_put(np.asarray(value)[slot_of], value.sharding)
        for key, value in mlp["placement"].items():
            mlp["placement"][key] = jax.device_put(
                getattr(make_placement(new, 8), key), value.sharding
            )
    for rank in d.ranks:
        rank.lens.clear(), rank.tables.clear()
        rank.used = 0
    after = d.step(work, 70, 2)
    assert d.traces == 1
    for a, b, case in zip(before, after, cases, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        np.testing.assert_allclose(b[: len(case["prompt"])], case["logits"], atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["deepseek_v2_lite", "deepseek_v3", "qwen3_moe", "deepseek_v3_halves"]
)
def test_tensor_parallel(name):
    cases = golden(name)
    run(driver(name, 2, 2, tp=2), cases, spread(cases, 2), 3 if name == "deepseek_v3" else 0)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2_groups"])
def test_chunked_prefill(name):
    """The second chunk of a prompt attends to the first one's entries; another sequence shares the
    step."""
    cases = golden(name)
    d = driver(name)
    long, short = cases[-1], cases[0]
    n = len(long["prompt"])
    first = d.step([[(0, long["prompt"][:21])]], 64, 3)[0]
    both = d.step([[(1, short["prompt"]), (0, long["prompt"][21:])]], 64, 3)[0]
    np.testing.assert_allclose(first[:21], long["logits"][:21], atol=TOLERANCE)
    at = len(short["prompt"])
    np.testing.assert_allclose(both[:at], short["logits"], atol=TOLERANCE)
    np.testing.assert_allclose(both[at : at + n - 21], long["logits"][21:], atol=TOLERANCE)


def test_loads_count_each_ranks_real_tokens():
    cases = golden("deepseek_v3")
    d = driver("deepseek_v3", 4, 2)
    d.step(
        [[(0, cases[2]["prompt"])], [], [(0, cases[1]["prompt"]), (1, cases[0]["prompt"])], []],
        50,
        2,
    )
    assert d.load.shape == (4, 2, 8) and d.load.dtype == np.int32
    np.testing.assert_array_equal(d.load.sum(-1), [[74, 74], [0, 0], [12, 12], [0, 0]])
