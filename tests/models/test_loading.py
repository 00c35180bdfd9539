"""Loading checkpoints: what is cast, fused, split and refused, and how much host memory
it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_driver import GOLDEN
from safetensors.numpy import load_file, save_file

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.llama import Llama
from deepinfer_jax.models.loading import abstract_model, load_hf_config, load_model

LLAMA = GOLDEN / "llama"


def variant(tmp_path: Path, tensors: dict[str, np.ndarray] | None = None, **config) -> Path:
    """A copy of the llama fixture with other tensors or config fields (None: the key removed)."""
    folder = tmp_path / "model"
    folder.mkdir()
    merged = json.loads((LLAMA / "config.json").read_text()) | config
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in merged.items() if v is not None})
    )
    save_file(
        load_file(LLAMA / "model.safetensors") if tensors is None else tensors,
        folder / "model.safetensors",
    )
    return folder


def leaves(model) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(p): np.asarray(v)
        for p, v in jax.tree_util.tree_leaves_with_path(model.params)
    }


def test_fused_kernels_hold_the_checkpoints_rows() -> None:
    source = load_file(LLAMA / "model.safetensors")
    layer = load_model(LLAMA, dtype="float32").params["layers"][1]
    prefix = "model.layers.1."
    qkv = np.concatenate([source[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv"])
    np.testing.assert_array_equal(layer["attn"]["qkv"]["kernel"], qkv)
    gate_up = np.concatenate([source[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    np.testing.assert_array_equal(layer["mlp"]["gate_up"]["kernel"], gate_up)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_source_floats_are_cast(tmp_path: Path, stored: str, target: str) -> None:
    source = {
        k: v.astype(jnp.dtype(stored)) for k, v in load_file(LLAMA / "model.safetensors").items()
    }
    kernel = load_model(variant(tmp_path, source), dtype=target).params["layers"][0]["mlp"]["down"][
        "kernel"
    ]
    assert kernel.dtype == jnp.dtype(target)
    expected = (
        source["model.layers.0.mlp.down_proj.weight"].astype(np.float32).astype(jnp.dtype(target))
    )
    np.testing.assert_array_equal(np.asarray(kernel), expected)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    tensors = load_file(LLAMA / "model.safetensors")
    folder = variant(tmp_path)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    whole, sharded = (
        leaves(load_model(LLAMA, dtype="float32")),
        leaves(load_model(folder, dtype="float32")),
    )
    for name, value in whole.items():
        np.testing.assert_array_equal(value, sharded[name], err_msg=name)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks weight files: model-00002-of-00003"):
        load_model(folder, dtype="float32")


def test_one_error_names_every_bad_tensor(tmp_path: Path) -> None:
    tensors = load_file(LLAMA / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((127, 64), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((128, 64), np.int32)
    tensors["model.layers.9.extra"] = np.zeros(1, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    with pytest.raises(ValueError) as error:
        load_model(variant(tmp_path, tensors), dtype="float32")
    text = str(error.value)
    for part in (
        "missing model.layers.0.self_attn.k_proj.weight",
        "missing model.norm.weight",
        (
            "wrong shape model.layers.1.mlp.up_proj.weight: (127, 64) in the checkpoint, (128, 64)"
            " expected"
        ),
        "wrong dtype model.layers.2.mlp.up_proj.weight: int32",
        "unexpected model.layers.9.extra",
    ):
        assert part in text
    assert "inv_freq" not in text


def test_a_tied_checkpoint_may_carry_its_head(tmp_path: Path) -> None:
    tensors = load_file(LLAMA / "model.safetensors")
    folder = variant(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "head" not in load_model(folder, dtype="float32").params


def test_untied_without_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        load_model(variant(tmp_path, tie_word_embeddings=False), dtype="float32")


def test_old_config_spelling(tmp_path: Path) -> None:
    rope = {"type": "linear", "factor": 2.0}
    old = load_hf_config(
        variant(tmp_path, rope_parameters=None, rope_theta=123.0, rope_scaling=rope, head_dim=None)
    )
    new = json.loads((LLAMA / "config.json").read_text()) | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 123.0, "factor": 2.0}
    }
    assert Llama.config_from_hf(old) == Llama.config_from_hf(new)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("hidden_act", "gelu", "hidden_act 'gelu'"),
        ("rope_parameters", {"rope_type": "longrope", "factor": 2.0}, "short_factor must have 8"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic'"),
        ("architectures", ["GPT2LMHeadModel"], "architecture GPT2LMHeadModel is not supported"),
        ("vocab_size", None, "lacks vocab_size"),
        ("intermediate_size", None, "lacks intermediate_size"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "'gptq'"),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"weight_block_size \[64, 64\]",
        ),
    ],
)
def test_unsupported_configurations_are_named(
    tmp_path: Path, field: str, value, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        load_model(variant(tmp_path, **{field: value}), dtype="float32")


def test_bad_arguments(tmp_path: Path) -> None:
    for kwargs, match in (
        ({"dtype": "int8"}, "dtype int8"),
        ({"dtype": "float32", "quant": "int3"}, "'int3'"),
        ({"dtype": "float32", "load_format": "pt"}, "'pt'"),
    ):
        with pytest.raises(ValueError, match=match):
            load_model(LLAMA, **kwargs)
    with pytest.raises(ValueError, match="no such model"):
        load_model(tmp_path / "nothing", dtype="float32")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path, dtype="float32")
    shutil.copy(LLAMA / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"lacks weight files: model\.safetensors"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "model.safetensors").write_bytes((LLAMA / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match="safetensors"):
        load_model(tmp_path, dtype="float32")


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    shutil.copy(LLAMA / "config.json", tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", load_format="dummy")
    kernel = np.asarray(model.params["layers"][0]["mlp"]["down"]["kernel"], np.float32)
    assert abs(kernel.std() - 128**-0.5) < 0.01
    np.testing.assert_array_equal(model.params["norm"]["weight"], np.ones(64, ml_dtypes.bfloat16))


def test_abstract_model_has_the_loaded_shapes() -> None:
    loaded = load_model(LLAMA, dtype="float32", quant="int4")
    _, abstract, specs = abstract_model(loaded.config, Llama, ParallelAxes(), "float32", "int4")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), loaded.params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract
    )
    assert jax.tree.structure(specs) == jax.tree.structure(abstract)


FP8_SHAPE = (256, 384)


def test_fp8_checkpoint_is_dequantised_or_kept(tmp_path: Path) -> None:
    """mlp.down as fp8 with 128x128 scales: a float model gets the product, an fp8 model the stored
    bytes."""
    config = dict(
        hidden_size=FP8_SHAPE[0], intermediate_size=FP8_SHAPE[1], num_hidden_layers=1, head_dim=64
    )
    dummy = tmp_path / "dummy"
    dummy.mkdir()
    (dummy / "config.json").write_text(
        json.dumps(json.loads((LLAMA / "config.json").read_text()) | config)
    )
    rng = np.random.default_rng(0)
    params = load_model(dummy, dtype="float32", load_format="dummy").params["layers"][0]
    q, k, v = np.split(np.asarray(params["attn"]["qkv"]["kernel"]), [256, 384])
    gate, up = np.split(np.asarray(params["mlp"]["gate_up"]["kernel"]), 2)
    prefix, down = "model.layers.0.", rng.standard_normal(FP8_SHAPE).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    linears = {
        "self_attn.q": q,
        "self_attn.k": k,
        "self_attn.v": v,
        "self_attn.o": q,
        "mlp.gate": gate,
        "mlp.up": up,
    }
    tensors = {f"{prefix}{n}_proj.weight": np.ascontiguousarray(w) for n, w in linears.items()}
    tensors |= {
        f"{prefix}mlp.down_proj.weight": down,
        f"{prefix}mlp.down_proj.weight_scale_inv": scale,
    }
    tensors |= {
        f"{prefix}{n}_layernorm.weight": np.ones(256, np.float32)
        for n in ("input", "post_attention")
    }
    tensors |= {
        "model.norm.weight": np.ones(256, np.float32),
        "model.embed_tokens.weight": np.ones((512, 256), np.float32),
    }
    folder = variant(
        tmp_path,
        tensors,
        **config,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    product = down.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)
    plain = load_model(folder, dtype="float32").params["layers"][0]["mlp"]["down"]
    np.testing.assert_array_equal(plain["kernel"], product)
    kept = load_model(folder, dtype="float32", quant="fp8").params["layers"][0]["mlp"]["down"]
    np.testing.assert_array_equal(np.asarray(kept["kernel"]).view(np.uint8), down.view(np.uint8))
    np.testing.assert_array_equal(kept["kernel_scale"], scale)
    del tensors[f"{prefix}mlp.down_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"missing model\.layers\.0\.mlp\.down_proj\.weight_scale_inv"
    ):
        load_model(folder, dtype="float32")


MEASURE = """
import json, sys, threading, time
import jax, psutil
from deepinfer_jax.models.loading import load_model
load_model(sys.argv[1], dtype="float32")
jax.block_until_ready(jax.numpy.ones(8) + 1)
process = psutil.Process()
used = lambda: (lambda m: m.rss)(process.memory_info())
before, peak, done = used(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], used())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[2], dtype=sys.argv[3])
peak[0] = max(peak[0], used())
done.set()
thread.join()
weights = sum(a.nbytes for a in jax.tree.leaves(model.params))
print(json.dumps({"peak": peak[0] - before, "weights": weights}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_peak_stays_within_a_fifth_of_the_weights(tmp_path: Path, dtype: str) -> None:
    """A 200 MB checkpoint, in a process of its own: resident memory (file pages included) at its
    highest."""
    config = dict(hidden_size=512, intermediate_size=4096, num_hidden_layers=6, vocab_size=16384)
    tensors = {
        "model.norm.weight": np.ones(512, np.float32),
        "model.embed_tokens.weight": np.ones((16384, 512), np.float32),
    }
    for i in range(6):
        shapes = {
            "self_attn.q_proj": (64, 512),
            "self_attn.k_proj": (32, 512),
            "self_attn.v_proj": (32, 512),
            "self_attn.o_proj": (512, 64),
        }
        shapes |= {
            "mlp.gate_proj": (4096, 512),
            "mlp.up_proj": (4096, 512),
            "mlp.down_proj": (512, 4096),
        }
        shapes |= {"input_layernorm": (512,), "post_attention_layernorm": (512,)}
        tensors |= {
            f"model.layers.{i}.{n}.weight": np.ones(s, np.float32) for n, s in shapes.items()
        }
    folder = variant(tmp_path, tensors, **config)
    del tensors
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(LLAMA), str(folder), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["weights"] > (180e6 if dtype == "float32" else 90e6)
    assert measured["peak"] < 1.2 * measured["weights"], measured
