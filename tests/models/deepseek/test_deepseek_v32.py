"""DeepSeek-V3.2 against Hugging Face: whole prompts, chunks cut anywhere,
decode, batches, meshes and the engine's promises.

The fixtures are made by tests/golden/make_golden.py and make_golden_sparse.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import step_batches
from engine_cases import GREEDY, Golden, small_llm, tokens
from paged_driver import PagedDriver, check_against_golden, golden_prompts

from deepinfer_jax.kernels_pallas import index_topk
from deepinfer_jax.models import registry
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.sparse.indexer import IndexerConfig, quantize_keys
from deepinfer_jax.models.loading import load_model

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ("deepseek_v32", "deepseek_v32_yarn")
V32 = Golden("deepseek_v32")


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompts_and_decode(name):
    check_against_golden(name)


@pytest.mark.parametrize("chunk", [5])
def test_prompts_cut_anywhere(chunk):
    check_against_golden("deepseek_v32", chunk=chunk, block_size=8)


def test_a_context_within_top_k_is_plain_attention():
    """With as many choices as the context has keys, both paths attend to everything."""
    cases = golden_prompts("deepseek_v32")
    logits = {}
    for top_k in (127, 128):  # the driver's tables hold 32 pages of 4 tokens
        config = indexer("deepseek_v32", top_k=top_k)
        model = load_model(
            GOLDEN / "deepseek_v32", dtype="float32", config_overrides={"indexer": config}
        )
        logits[top_k] = PagedDriver(model).prefill({0: cases[3]["prompt"]})[0]
    np.testing.assert_allclose(logits[127], logits[128], atol=1e-5)
    assert np.abs(logits[127][-1] - cases[3]["logits"][-1]).max() > 0.01, "8 of 70 keys differ"


def indexer(name: str, **changes) -> IndexerConfig:
    hf = json.loads((GOLDEN / name / "config.json").read_text())
    return dataclasses.replace(registry.resolve(hf).config_from_hf(hf).indexer, **changes)


def test_fp8_index_keys():
    """A cache of e4m3 keys and factors; while all keys are chosen, it changes nothing."""
    cases = golden_prompts("deepseek_v32")
    config = indexer("deepseek_v32", keys="fp8")
    model = load_model(
        GOLDEN / "deepseek_v32", dtype="float32", config_overrides={"indexer": config}
    )
    specs = {
        s.name: s for s in model.model_class.cache_specs(model.config, ParallelAxes(), jnp.bfloat16)
    }
    assert specs["index"].dtype == jnp.float8_e4m3fn and specs["index_scale"].entry_shape == ()
    driver = PagedDriver(model)
    first = driver.prefill({i: cases[i]["prompt"][:8] for i in (1, 3)})
    for i, logits in first.items():
        np.testing.assert_allclose(logits, cases[i]["logits"][:8], atol=2e-4)
    assert np.isfinite(driver.prefill({3: cases[3]["prompt"][8:]})[3]).all()


def test_fp8_keys_choose_nearly_the_same():
    rng = np.random.default_rng(4)
    q, w = rng.normal(size=(20, 8, 64)), rng.normal(size=(20, 8))
    keys = rng.normal(size=(200, 64))
    stored, factor = quantize_keys(jnp.asarray(keys, jnp.float32))
    pools = [(jnp.asarray(keys.reshape(50, 4, 64)), None), (stored.reshape(50, 4, 64), factor)]
    exact, rounded = (
        index_topk(
            jnp.asarray(q, jnp.float32),
            jnp.asarray(w, jnp.float32),
            pool.astype(jnp.float32),
            jnp.arange(50, dtype=jnp.int32)[None],
            jnp.full(20, 200),
            jnp.array([0, 20]),
            k=32,
            key_scales=None if scales is None else scales.reshape(50, 4),
        )
        for pool, scales in pools
    )
    shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(exact, rounded, strict=True)]
    assert np.mean(shared) > 0.93 * 32, shared


def test_fp8_keys_keep_three_bits_of_mantissa():
    keys = np.random.default_rng(0).normal(size=(50, 16)) * np.logspace(-6, 6, 50)[:, None]
    stored, factor = quantize_keys(jnp.asarray(keys, jnp.float32))
    assert stored.dtype == jnp.float8_e4m3fn and (np.log2(factor) % 1 == 0).all()
    back = np.asarray(stored, np.float64) * np.asarray(factor)[:, None]
    large = np.abs(keys) > np.abs(keys).max(-1, keepdims=True) / 1000
    np.testing.assert_allclose(back[large], keys[large], rtol=2**-4)


@pytest.mark.parametrize(("dp", "ep", "tp"), [(2, 2, 1), (4, 2, 1), (2, 2, 2)])
def test_meshes_with_uneven_loads(dp, ep, tp):
    cases = golden_prompts("deepseek_v32")
    axes = ParallelAxes(dp=dp, ep=ep, tp=tp)
    mesh = step_batches.make_mesh(axes)
    model = load_model(GOLDEN / "deepseek_v32", dtype="float32", mesh=mesh, axes=axes)
    driver = step_batches.Driver(model, axes, mesh, num_blocks=48)
    ranks = [[3, 0], [2]] + [[], [1]] * (dp // 2 - 1)
    logits = driver.step([[(i, cases[i]["prompt"]) for i in own] for own in ranks], 80, 3)
    last = [{} for _ in ranks]
    for rank, own in enumerate(ranks):
        at = 0
        for i in own:
            n = len(cases[i]["prompt"])
            np.testing.assert_allclose(logits[rank][at : at + n], cases[i]["logits"], atol=5e-4)
            last[rank][i] = int(logits[rank][at + n - 1].argmax())
            at += n
    for step in range(4):
        for own in last:
            assert all(token == cases[i]["greedy"][step] for i, token in own.items())
        work = [[(i, np.array([t], np.int32)) for i, t in own.items()] for own in last]
        logits = driver.step(work, 3, 3, decode=True)
        last = [
            {i: int(out[s].argmax()) for s, i in enumerate(own)}
            for out, own in zip(logits, last, strict=True)
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"chunked_prefill": True, "max_num_batched_tokens": 37, "prefill_buckets": (37,)},
        {"block_size": 4, "num_blocks": 44, "max_model_len": 110, "enable_prefix_caching": True},
        {"num_decode_steps": 4},
        {"data_parallel_size": 2, "expert_parallel_size": 2},
    ],
    ids=["chunked", "preempted", "four-steps", "dp2ep2"],
)
def test_the_engine_keeps_its_promises(changes):
    with small_llm("deepseek_v32", **changes) as llm:
        assert tokens(llm, V32.prompts * 2) == V32.greedy * 2
        assert "num_blocks" not in changes or llm.stats()["preemptions"] > 0


def test_several_completions_of_a_prompt_and_its_logprobs():
    with small_llm("deepseek_v32", enable_prefix_caching=True) as llm:
        params = GREEDY.replace(n=3, prompt_logprobs=1)
        for _ in range(2):  # the second time the prompt's blocks come from the cache
            out = llm.generate(
                prompt_token_ids=V32.prompts[3:], sampling_params=params, use_tqdm=False
            )[0]
            assert [c.token_ids for c in out.outputs] == V32.greedy[3:] * 3
            reference = V32.log_softmax(3)
            for position, entry in enumerate(out.prompt_logprobs[1:]):
                token = V32.prompts[3][position + 1]
                assert abs(entry[token].logprob - reference[position][token]) < 5e-4


def test_prompt_and_completion_engines_return_what_one_engine_does():
    with small_llm(
        "deepseek_v32",
        disaggregate="1P:1D",
        completion_mesh={"data_parallel_size": 2, "expert_parallel_size": 2},
    ) as llm:
        out = llm.generate(prompt_token_ids=V32.prompts, sampling_params=GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in out] == V32.greedy


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("q_lora_rank", None, "q_lora_rank"),
        ("layer_types", ["full_attention"] * 3, "full_attention"),
        ("mlp_layer_types", ["dense"], "mlp_layer_types"),
        ("index_head_dim", 4, "index_head_dim 4"),
        ("index_topk", -1, "index_topk"),
    ],
)
def test_configurations_that_are_refused(key, value, message):
    hf = json.loads((GOLDEN / "deepseek_v32" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        registry.resolve(hf).config_from_hf(hf | {key: value})
