"""DeepSeek-V4 against Hugging Face: whole prompts, chunks cut anywhere (inside windows and inside
unfinished entries), decode, batches and meshes; both spellings of names and configurations.

The fixtures are made by tests/golden/make_golden.py and make_golden_sparse.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import step_batches
from checkpoint_writer import write_checkpoint
from paged_driver import check_against_golden, golden_prompts
from safetensors.numpy import load_file

from deepinfer_jax.models import registry
from deepinfer_jax.models.base import PagedCache, ParallelAxes
from deepinfer_jax.models.deepseek_v4_config import config_from_hf
from deepinfer_jax.models.loading import load_model

GOLDEN = Path(__file__).parents[2] / "golden"


def config_json(name: str = "deepseek_v4") -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "chunk", "block_size"),
    [
        ("deepseek_v4", None, 8),
        ("deepseek_v4", 5, 16),  # less than a window, an entry of 8 tokens or what both need
        ("deepseek_v4", 37, 4),  # entries of 8 tokens span two blocks
        ("deepseek_v4_yarn", None, 6),
        ("deepseek_v4_yarn", 13, 24),
    ],
)
def test_prompts_cut_anywhere_and_decode(name, chunk, block_size):
    check_against_golden(name, chunk=chunk, block_size=block_size)


@pytest.mark.parametrize(("dp", "ep", "tp"), [(2, 2, 1), (1, 1, 2)])
def test_meshes_with_uneven_loads(dp, ep, tp):
    cases = golden_prompts("deepseek_v4")
    axes = ParallelAxes(dp=dp, ep=ep, tp=tp)
    mesh = step_batches.make_mesh(axes)
    model = load_model(GOLDEN / "deepseek_v4", dtype="float32", mesh=mesh, axes=axes)
    driver = step_batches.Driver(model, axes, mesh, num_blocks=48)
    ranks = [[3, 0], [2]][:dp]
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
    assert driver.load.shape == (dp, 4, 8)


PUBLISHED = (
    (r"model\.embed_tokens\.(.*)", r"embed.\1"),
    (r"model\.hc_head\.hc_(\w+)", r"hc_head_\1"),
    (r"model\.(layers\.\d+\.attn)\.norm\.(.*)", r"\1.kv_norm.\2"),
    (r"model\.(.*)", r"\1"),
)


def test_the_published_spelling_loads_the_same(tmp_path):
    """embed.weight, layers.0.attn.kv_norm.weight, hc_head_fn; compress_ratios, num_hash_layers and
    qk_rope_head_dim; a draft layer that is left alone."""
    tensors = {}
    for name, tensor in load_file(GOLDEN / "deepseek_v4" / "model.safetensors").items():
        for pattern, replacement in PUBLISHED:
            if match := re.fullmatch(pattern, name):
                name = match.expand(replacement)
                break
        tensors[name] = tensor
    assert "layers.2.attn.indexer.compressor.ape" in tensors and "norm.weight" in tensors
    tensors["mtp.0.attn.wkv.weight"] = np.zeros((2, 2), np.float32)
    hf = {k: v for k, v in config_json().items() if not re.search("_types|rates|rope_para|part", k)}
    hf |= {
        "compress_ratios": [0, 8, 4, 4, 0],
        "compress_rate_hca": 8,
        "num_hash_layers": 1,
        "qk_rope_head_dim": 8,
        "num_nextn_predict_layers": 1,
    }
    write_checkpoint(tmp_path, hf, tensors)
    loaded = load_model(tmp_path, dtype="float32")
    original = load_model(GOLDEN / "deepseek_v4", dtype="float32")
    assert loaded.config.layer_types == original.config.layer_types
    assert loaded.config.mlp_types == original.config.mlp_types
    assert loaded.config.attention == original.config.attention
    check_same(loaded.params, original.params)


def check_same(a, b) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            check_same(a[key], b[key])
    else:
        np.testing.assert_array_equal(a, b)


def test_a_name_in_both_spellings_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "deepseek_v4", tmp_path / "m")
    tensors = dict(load_file(GOLDEN / "deepseek_v4" / "model.safetensors"))
    tensors["norm.weight"] = tensors["model.norm.weight"]
    write_checkpoint(tmp_path / "m", config_json(), tensors)
    with pytest.raises(ValueError, match=r"both stand for norm\.weight"):
        load_model(tmp_path / "m", dtype="float32")


def test_caches_of_the_published_shapes():
    """Bytes of V4-Flash per token and sequence, in bfloat16."""
    hf = config_json() | {
        "num_hidden_layers": 43,
        "layer_types": None,
        "compress_rates": None,
        "mlp_layer_types": None,
        "head_dim": 512,
        "num_attention_heads": 64,
        "index_head_dim": 128,
        "sliding_window": 128,
        "partial_rotary_factor": 0.125,
        "rope_parameters": None,
    }
    config = config_from_hf(hf)
    specs = registry.resolve(hf).cache_specs(config, ParallelAxes(), jnp.bfloat16)
    sizes = {s.name: s for s in specs}
    assert [config.layer_types.count(t) for t in dict(config.attention.ratios)] == [20, 23]
    paged = [s for s in specs if isinstance(s, PagedCache)]
    assert {s.name: s.entries_per_block(128) for s in paged} == {
        "heavy": 1,
        "sparse": 32,
        "index": 32,
    }
    assert sizes["window"].shape == (136, 512) and sizes["window"].layers == 43
    assert sizes["sparse_rows"].shape == (16, 2048) and sizes["heavy_rows"].shape == (136, 1024)
    with pytest.raises(ValueError, match=r"block_size 48 .* 'heavy'"):
        sizes["heavy"].entries_per_block(48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention"),
        ({"layer_types": None, "compress_ratios": [0, 16, 4, 4]}, "compress_ratios"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
        ({"compress_rates": {"other": 4}}, "compress_rates"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "compress_rates"),
        ({"scoring_func": "relu"}, "scoring_func 'relu'"),
        ({"o_groups": 3}, "output groups"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"hc_sinkhorn_iters": -1}, "hc_sinkhorn_iters"),
        ({"attention_bias": True}, "attention_bias"),
        ({"index_head_dim": 4}, "index_head_dim 4"),
    ],
)
def test_configurations_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(config_json() | changes)
