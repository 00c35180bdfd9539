"""Expert balance in an engine: same tokens, no compiles, counts that add up, when what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from engine_cases import GREEDY, SMALL, Golden

from deepinfer_jax import SamplingParams
from deepinfer_jax.config import EngineArgs
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.stats.prometheus import EngineCollector
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.experts.policy import imbalance
from deepinfer_jax.snapshot import job

NEVER = {"expert_rearrangement_interval": 10**9}
EP = {"expert_parallel_size": 4, "num_redundant_experts": 4, "strict_compiles": True}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True)


def engine_of(name: str = "deepseek_v3", **changes: Any) -> LLMEngine:
    return LLMEngine(EngineArgs(Golden(name).path, **{**SMALL, **EP, **changes}))


def random_slots(rng: np.random.Generator, like: np.ndarray, experts: int) -> np.ndarray:
    extra = like.shape[1] - experts
    rows = [np.concatenate([np.arange(experts), rng.integers(0, experts, extra)]) for _ in like]
    return np.array([rng.permutation(row) for row in rows], np.int32)


def serve(
    engine: LLMEngine,
    requests: Iterable[tuple[str, list[int], SamplingParams]],
    before_step: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Tokens per request."""
    done = {}
    for name, prompt, params in requests:
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        before_step()
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    engine.check_integrity()
    return done


def counted(engine: LLMEngine) -> np.ndarray:
    """i32 [layers, experts] of all steps in the window."""
    return np.asarray(engine.experts.arrays.read_counts()).sum(0)


@pytest.mark.parametrize(("name", "steps"), [("deepseek_v3", 3), ("qwen3_moe", 1)])
def test_tokens_and_counts_with_a_rearrangement_before_every_step(name, steps):
    """The tokens are those without one. NORMAL: a request's first token comes from its prefill
    step, which does not count; every later one counts once per layer and choice."""
    golden, engine = Golden(name), engine_of(name, num_decode_steps=steps, **NEVER)
    rng, arrays = np.random.default_rng(0), engine.experts.arrays
    group, compiled = arrays.group, engine.runner.programs.names()
    greedy = [(f"greedy{i}", p, GREEDY) for i, p in enumerate(golden.prompts)]
    both = greedy + [(f"sampled{i}", p, SAMPLED) for i, p in enumerate(golden.prompts)]
    plain = serve(engine, both)
    before = counted(engine)
    moved = serve(
        engine,
        both,
        lambda: engine.experts.rearrange(random_slots(rng, arrays.slots, group.num_experts)),
    )
    assert moved == plain
    assert [moved[name] for name, *_ in greedy] == [t[: GREEDY.max_tokens] for t in golden.greedy]
    assert engine.runner.programs.names() == compiled
    assert engine.stats()["compiles_after_warm_up"] == 0
    assert engine.stats()["xla_compiles_after_warm_up"] == 0
    decoded = len(golden.prompts) * (GREEDY.max_tokens + SAMPLED.max_tokens - 2)
    assert before.shape == (len(group.layers), group.num_experts)
    for counts in (before, counted(engine) - before):
        np.testing.assert_array_equal(counts.sum(1), decoded * engine.model_config.router.top_k)


def test_prefill_tokens_count_where_the_role_says():
    engine = engine_of(**NEVER, engine_type="PROMPT", chunked_prefill=True)
    prompts = Golden("deepseek_v3").prompts
    serve(engine, [(str(i), p, GREEDY) for i, p in enumerate(prompts)])
    top_k = engine.model_config.router.top_k
    np.testing.assert_array_equal(counted(engine).sum(1), sum(map(len, prompts)) * top_k)


def test_skewed_routing_is_balanced_while_serving_and_after_a_restart(tmp_path, monkeypatch):
    """Tokens prefer the experts of the first rank; experts move by themselves, a layer per step."""
    monkeypatch.setenv("DEEPINFER_FORCE_IMBALANCE_RATIO", "3")
    monkeypatch.setenv("DEEPINFER_EXPERT_COUNT_WINDOW_SIZE", "8")
    path = str(tmp_path / "placement")
    args = {"expert_rearrangement_interval": 10, "expert_placement": path}
    engine = engine_of(**args)
    prompts = Golden("deepseek_v3").prompts
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    serve(engine, [(f"{i}{j}", p, long) for i, p in enumerate(prompts) for j in range(4)])
    stats = engine.stats()
    balance = stats["experts"]
    assert stats["compiles_after_warm_up"] == stats["xla_compiles_after_warm_up"] == 0
    assert balance["rearrangements"] >= 1 and balance["placement_version"] >= 1
    record = engine.experts.record()
    first = np.tile(np.arange(record.slots.shape[1]) % record.loads.shape[2], (2, 1))
    initial = imbalance(record.loads, first, 4)
    assert record.loads.shape[1] == 8 and (initial > 1.5).all()
    now = imbalance(record.loads, record.slots, 4)
    np.testing.assert_allclose(balance["imbalance"], now, atol=1e-4)
    assert (now < 1.25).all() and (now < initial - 0.4).all()
    families = {m.name: m for m in EngineCollector(engine).collect()}
    layers = [s.value for s in families["deepinfer_expert_imbalance_ratio"].samples]
    np.testing.assert_allclose(layers, now)
    taken = job.capture(engine).record.experts
    engine.close()
    np.testing.assert_array_equal(PlacementRecord.load(path).slots, record.slots)
    np.testing.assert_array_equal(taken.slots, record.slots)

    again = engine_of(**args)
    np.testing.assert_array_equal(again.experts.arrays.slots, record.slots)
    for layer, home in enumerate(again.experts.arrays.group.layers):
        table = again.runner.params[home.tables[0]]
        np.testing.assert_array_equal(np.asarray(table), record.slots[layer])
    again.close()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"expert_rearrangement_interval": 5}, "the model has no experts"),
        ("llama", {"expert_placement": "x"}, "expert_placement=x: the model has no experts"),
        ("qwen3_moe", {"expert_rearrangement_interval": 5}, "on one rank there is nothing"),
        ("qwen3_moe", {"expert_parallel_size": 4, "expert_layers_per_step": 0}, "must be >= 1"),
        ("qwen3_moe", {"expert_parallel_size": 4, "expert_nodes": 3}, "over nodes"),
    ],
)
def test_what_could_not_do_anything_is_refused(name, changes, words):
    with pytest.raises(ValueError, match=words):
        LLMEngine(EngineArgs(Golden(name).path, **{**SMALL, **changes}))
