"""Expert balance in an engine: same tokens, no compiles, counts that add up, when what happens."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import GREEDY, SMALL, Golden

from deepinfer_jax import SamplingParams
from deepinfer_jax.config import EngineArgs
from deepinfer_jax.engine.llm_engine import LLMEngine

EP = {"expert_parallel_size": 4, "num_redundant_experts": 4, "strict_compiles": True}


def random_slots(rng: np.random.Generator, like: np.ndarray, experts: int) -> np.ndarray:
    extra = like.shape[1] - experts
    rows = [np.concatenate([np.arange(experts), rng.integers(0, experts, extra)]) for _ in like]
    return np.array([rng.permutation(row) for row in rows], np.int32)


def run_rearranging(engine: LLMEngine, requests, seed: int) -> dict[str, list[int]]:
    """Serves (id, prompt, params), all experts in a new random order before every step."""
    rng, done = np.random.default_rng(seed), {}
    for name, prompt, params in requests:
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        engine.experts.rearrange(
            random_slots(rng, engine.experts.arrays.slots, engine.experts.arrays.group.num_experts)
        )
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
    return done


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_tokens_do_not_change_with_a_rearrangement_before_every_step(name):
    golden = Golden(name)
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True)
    requests = [
        (f"{kind}{i}", prompt, params)
        for i, prompt in enumerate(golden.prompts)
        for kind, params in (("greedy", GREEDY), ("sampled", sampled))
    ]
    args = {**SMALL, **EP, "num_decode_steps": 2}
    args["expert_rearrangement_interval"] = 10**9
    engine = LLMEngine(EngineArgs(str(golden.path), **args))
    compiled = engine.runner.programs.names()
    moved = run_rearranging(engine, requests, 0)
    plain = LLMEngine(EngineArgs(str(golden.path), **{**SMALL, "num_decode_steps": 2}))
    for name_, prompt, params in requests:
        plain.add_request(name_, prompt, params)
    expected = {}
    while plain.has_unfinished_requests():
        expected |= {o.request_id: o.outputs[0].token_ids for o in plain.step() if o.finished}
    assert moved == expected
    assert engine.runner.programs.names() == compiled
    assert engine.stats()["compiles_after_warm_up"] == 0
    for i in range(len(golden.prompts)):
        assert moved[f"greedy{i}"] == golden.greedy[i][:24]


def serve(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()


def engine_of(name: str = "deepseek_v3", **changes) -> LLMEngine:
    return LLMEngine(EngineArgs(Golden(name).path, **{**SMALL, **EP, **changes}))


def counted(engine: LLMEngine) -> np.ndarray:
    """i32 [layers, experts] of all steps in the window."""
    return np.asarray(engine.experts.arrays.read_counts()).sum(0)


@pytest.mark.parametrize("steps", [1, 3])
def test_every_decoded_token_counts_once_per_layer_and_choice(steps):
    """NORMAL: the first token of a request comes from its prefill step, which does not count."""
    engine = engine_of(num_decode_steps=steps, expert_rearrangement_interval=10**9)
    serve(engine, Golden("deepseek_v3").prompts)
    router = engine.model_config.router
    decoded = len(Golden("deepseek_v3").prompts) * (GREEDY.max_tokens - 1)
    counts = counted(engine)
    assert counts.shape == (len(engine.experts.arrays.group.layers), router.num_experts)
    np.testing.assert_array_equal(counts.sum(1), decoded * router.top_k)


def test_prefill_tokens_count_where_the_role_or_the_environment_says(monkeypatch):
    monkeypatch.setenv("DEEPINFER_REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", "1")
    prompts = Golden("deepseek_v3").prompts
    one = SamplingParams(temperature=0.0, max_tokens=1)
    normal = engine_of(expert_rearrangement_interval=10**9)
    monkeypatch.delenv("DEEPINFER_REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE")
    prompt = engine_of(
        expert_rearrangement_interval=10**9, engine_type="PROMPT", chunked_prefill=True
    )
    for engine in (normal, prompt):
        serve(engine, prompts, one)
        top_k = engine.model_config.router.top_k
        np.testing.assert_array_equal(counted(engine).sum(1), sum(map(len, prompts)) * top_k)
