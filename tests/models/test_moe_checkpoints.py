"""DeepSeek checkpoints: FP8 blocks, draft layers, config spellings, and what a process reads of the
experts."""

from __future__ import annotations

import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writer import FP8_CONFIG, read_checkpoint, to_fp8, write_checkpoint
from step_batches import Driver, make_mesh

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.checkpoint import Checkpoint
from deepinfer_jax.models.deepseek import DeepseekV2, DeepseekV3
from deepinfer_jax.models.layers.experts import Experts
from deepinfer_jax.models.loading import load_model
from deepinfer_jax.models.materialize import Materializer, Slot
from deepinfer_jax.models.qwen3_moe import Qwen3Moe

GOLDEN = Path(__file__).parents[1] / "golden"
ONE_DEVICE = ParallelAxes()
PROMPT = np.arange(3, 40, dtype=np.int32)


def logits(
    folder: Path, axes: ParallelAxes = ONE_DEVICE, dtype: str = "float32", **kwargs
) -> np.ndarray:
    mesh = make_mesh(axes)
    d = Driver(load_model(folder, dtype=dtype, mesh=mesh, axes=axes, **kwargs), axes, mesh)
    return d.step([[(0, PROMPT)]] + [[]] * (axes.dp - 1), 40, 2)[0][: len(PROMPT)]


# ---- FP8 blocks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_fp8(tmp_path_factory) -> tuple[Path, Path]:
    """The golden DeepSeek-V3 in FP8 blocks, and in the float32 values those blocks stand for."""
    config, tensors = read_checkpoint(GOLDEN / "deepseek_v3")
    quantized, plain = to_fp8(tensors)
    root = tmp_path_factory.mktemp("golden_fp8")
    config_fp8 = config | {"quantization_config": FP8_CONFIG}
    return write_checkpoint(root / "fp8", config_fp8, quantized), write_checkpoint(
        root / "plain", config, plain
    )


WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 144,
    "vocab_size": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "q_lora_rank": 136,
    "kv_lora_rank": 140,
    "v_head_dim": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def wide_fp8(tmp_path_factory) -> tuple[Path, Path]:
    """Several blocks in both directions, the last ones partial, in every kind of matrix."""
    c = read_checkpoint(GOLDEN / "deepseek_v3")[0] | WIDE
    rng, heads, d = np.random.default_rng(0), c["num_attention_heads"], c["hidden_size"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], d),
        "lm_head.weight": (c["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    for i in range(c["num_hidden_layers"]):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {
            f"model.layers.{i}.{n}_layernorm.weight": (d,) for n in ("input", "post_attention")
        }
        shapes |= {
            f"{at}.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{at}.kv_a_layernorm.weight": (c["kv_lora_rank"],),
        }
        shapes |= {
            f"{at}.q_a_proj.weight": (c["q_lora_rank"], d),
            f"{at}.q_b_proj.weight": (heads * qk, c["q_lora_rank"]),
        }
        shapes[f"{at}.kv_a_proj_with_mqa.weight"] = (c["kv_lora_rank"] + c["qk_rope_head_dim"], d)
        shapes[f"{at}.kv_b_proj.weight"] = (
            heads * (c["qk_nope_head_dim"] + c["v_head_dim"]),
            c["kv_lora_rank"],
        )
        shapes[f"{at}.o_proj.weight"] = (d, heads * c["v_head_dim"])
        parts = (
            [f"{mlp}.experts.{e}" for e in range(c["n_routed_experts"])] + [f"{mlp}.shared_experts"]
            if i
            else [mlp]
        )
        inner = c["moe_intermediate_size"] if i else c["intermediate_size"]
        shapes |= {f"{p}.{n}_proj.weight": (inner, d) for p in parts for n in ("gate", "up")}
        shapes |= {f"{p}.down_proj.weight": (d, inner) for p in parts}
        shapes |= (
            {
                f"{mlp}.gate.weight": (c["n_routed_experts"], d),
                f"{mlp}.gate.e_score_correction_bias": (c["n_routed_experts"],),
            }
            if i
            else {}
        )
    tensors = {
        n: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32)
        if len(s) > 1
        else np.ones(s, np.float32)
        for n, s in shapes.items()
    }
    quantized, plain = to_fp8(tensors)
    root = tmp_path_factory.mktemp("wide_fp8")
    return write_checkpoint(
        root / "fp8", c | {"quantization_config": FP8_CONFIG}, quantized
    ), write_checkpoint(root / "plain", c, plain)


def test_fp8_blocks_are_dequantised_on_load(golden_fp8):
    fp8, plain = golden_fp8
    np.testing.assert_allclose(logits(fp8), logits(plain), atol=1e-5)


@pytest.mark.parametrize("axes", [ParallelAxes(), ParallelAxes(dp=4, ep=2)], ids=["1x1", "4x2"])
def test_fp8_kept_and_fp8_dequantised_equal_the_float_model(wide_fp8, axes):
    fp8, plain = wide_fp8
    want = logits(plain)
    np.testing.assert_allclose(logits(fp8, axes), want, atol=2e-5)
    np.testing.assert_allclose(logits(fp8, axes, quant="fp8"), want, atol=2e-5)


def test_fp8_kept_stores_the_checkpoints_own_bytes(wide_fp8):
    loaded = load_model(wide_fp8[0], dtype="bfloat16", quant="fp8")
    _, tensors = read_checkpoint(wide_fp8[0])
    experts = loaded.params["layers"][1]["mlp"]["experts"]
    assert experts["gate_up"].dtype == jnp.float8_e4m3fn and experts["gate_up_scale"].shape == (
        4,
        2,
        2,
    )
    for e in range(4):
        name = f"model.layers.1.mlp.experts.{e}"
        both = [tensors[f"{name}.{n}_proj.weight"] for n in ("gate", "up")]
        np.testing.assert_array_equal(
            np.asarray(experts["gate_up"])[e].view(np.uint8), np.concatenate(both).view(np.uint8)
        )
        np.testing.assert_array_equal(
            experts["down_scale"][e], tensors[f"{name}.down_proj.weight_scale_inv"]
        )
    attn = loaded.params["layers"][1]["attn"]
    assert attn["kv_a"]["kernel"].dtype == jnp.float8_e4m3fn and attn["kv_a"][
        "kernel_scale"
    ].shape == (2, 2)
    assert (
        attn["w_uk"].dtype == jnp.bfloat16
        and loaded.params["layers"][1]["mlp"]["gate"].dtype == jnp.float32
    )


def test_fp8_blocks_that_fusing_would_cut_are_refused(golden_fp8):
    with pytest.raises(ValueError, match="would cut their fp8 blocks"):
        load_model(golden_fp8[0], dtype="float32", quant="fp8")


def test_int8_experts(wide_fp8):
    got, want = logits(wide_fp8[1], quant="int8"), logits(wide_fp8[1])
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.998


def test_int4_experts_are_refused():
    with pytest.raises(ValueError, match="experts can be stored as"):
        Experts(8, 64, 64, dtype=jnp.float32, quant="int4", axes=ParallelAxes())


# ---- draft layers, experts' slices ---------------------------------------------------------------


def test_draft_layers_are_noted_and_left_in_the_checkpoint(tmp_path, caplog):
    config, tensors = read_checkpoint(GOLDEN / "deepseek_v3")
    extra = {
        f"model.layers.3.{n}": np.zeros((2, 2), np.float32)
        for n in ("eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight")
    }
    folder = write_checkpoint(tmp_path / "mtp", config, tensors | extra)
    with caplog.at_level(logging.INFO):
        load_model(folder, dtype="float32")
    assert "3 tensors" in caplog.text and "model.layers.3." in caplog.text
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.7\.x"):
        load_model(
            write_checkpoint(
                tmp_path / "bad",
                config,
                tensors | {"model.layers.7.x": extra["model.layers.3.enorm.weight"]},
            ),
            dtype="float32",
        )


def test_a_process_reads_only_its_experts(monkeypatch):
    axes = ParallelAxes(dp=4, ep=4)
    config = DeepseekV3.config_from_hf(read_checkpoint(GOLDEN / "deepseek_v3")[0])
    rules = [
        r
        for r in DeepseekV3.weight_rules(config, axes).rules
        if r.target == "layers.1.mlp.experts.gate_up"
    ]
    slot = Slot("x", (8, 64, 64), np.dtype(np.float32), ("expert", "tp", None), "normal", None)
    with Checkpoint(GOLDEN / "deepseek_v3") as checkpoint:
        read, real = [], checkpoint.read
        monkeypatch.setattr(checkpoint, "read", lambda name: (read.append(name), real(name))[1])
        (part,) = Materializer(checkpoint, rules[0], [slot], 1).build(
            [(slice(2, 4), slice(0, 64), slice(0, 64))]
        )
        whole = real("model.layers.1.mlp.experts.3.up_proj.weight")
        np.testing.assert_array_equal(part[1, 32:], whole)
    assert {int(name.split("experts.")[1].split(".")[0]) for name in read} == {2, 3}


# ---- config spellings ----------------------------------------------------------------------------

V3_PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


def test_the_published_deepseek_v3_config():
    c = DeepseekV3.config_from_hf(V3_PUBLISHED)
    assert (
        c.router.scoring,
        c.router.num_groups,
        c.router.topk_groups,
        c.router.scale,
        c.router.normalize,
    ) == ("sigmoid", 8, 4, 2.5, True)
    assert c.mla.rope.rope_type == "yarn" and c.mla.interleaved and c.mla.rope.cos_sin_scale == 1.0
    assert c.mla.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert [c.is_moe(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    (spec,) = DeepseekV3.cache_specs(c, ParallelAxes(), jnp.bfloat16)
    assert spec.entry_shape == (1, 576) and spec.layers == 61 and spec.tp_dim is None


def test_both_spellings_of_rope_give_the_same_model():
    new = {k: v for k, v in V3_PUBLISHED.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = {k: v for k, v in V3_PUBLISHED["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000.0}
    assert DeepseekV3.config_from_hf(new) == DeepseekV3.config_from_hf(V3_PUBLISHED)


def test_kimi_k2_and_moonlight_shapes():
    kimi = V3_PUBLISHED | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
    }
    c = DeepseekV3.config_from_hf(kimi)
    assert (
        c.router.num_experts == 384
        and c.router.num_groups == 1
        and c.router.bias
        and c.mtp_layers == 0
    )
    moonlight = kimi | {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_scaling": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
    }
    c = DeepseekV3.config_from_hf(moonlight)
    assert (
        c.mla.q_rank is None
        and c.mla.rope.rope_type == "default"
        and c.mla.scale == pytest.approx(192**-0.5)
    )


def test_deepseek_v2_routing_terms():
    v2 = V3_PUBLISHED | {
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "topk_group": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 16.0,
    }
    r = DeepseekV2.config_from_hf(v2).router
    assert (r.scoring, r.group_score, r.num_groups, r.topk_groups, r.normalize, r.bias) == (
        "softmax",
        "max",
        8,
        3,
        False,
        False,
    )
    lite = DeepseekV2.config_from_hf(v2 | {"topk_method": "greedy", "n_group": 1, "topk_group": 1})
    assert lite.router.num_groups == 1
    with pytest.raises(ValueError, match="'softmax' with topk_method 'noaux_tc'"):
        DeepseekV2.config_from_hf(v2 | {"topk_method": "noaux_tc"})
    with pytest.raises(ValueError, match="kv_lora_rank"):
        DeepseekV2.config_from_hf({k: v for k, v in v2.items() if k != "kv_lora_rank"})


def test_qwen3_moe_layers_and_spellings():
    hf, _ = read_checkpoint(GOLDEN / "qwen3_moe_sparse")
    c = Qwen3Moe.config_from_hf(hf)
    assert c.moe_layers == (False, False, False, True) and not c.router.normalize
    old = {k: v for k, v in hf.items() if k not in ("num_local_experts", "rope_parameters")} | {
        "num_experts": 10,
        "rope_theta": 10000.0,
    }
    assert Qwen3Moe.config_from_hf(old) == c
    assert (
        Qwen3Moe.config_from_hf(hf | {"mlp_only_layers": [], "decoder_sparse_step": 1}).moe_layers
        == (True,) * 4
    )


def test_dummy_weights_have_working_placement():
    loaded = load_model(GOLDEN / "deepseek_v3", dtype="float32", load_format="dummy")
    placement = loaded.params["layers"][1]["mlp"]["placement"]
    assert placement["replica_count"].tolist() == [1] * 8 and placement[
        "physical_to_logical"
    ].tolist() == list(range(8))
