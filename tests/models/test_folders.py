"""Model folders as they are in the wild: names, ties, buffers, shards, malformed configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from paged_driver import GOLDEN, PagedDriver, golden_prompts
from safetensors.numpy import load_file, save_file

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.loading import load_model

LLAMA = GOLDEN / "llama"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors() -> dict[str, np.ndarray]:
    return load_file(LLAMA / "model.safetensors")


def write(folder: Path, weights: dict[str, np.ndarray] | None, **config: object) -> Path:
    """The llama fixture (tied) with other weights and configuration; None: a key removed."""
    folder.mkdir(exist_ok=True)
    merged = json.loads((LLAMA / "config.json").read_text()) | config
    merged = {k: v for k, v in merged.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def check_logits(folder: Path) -> None:
    """The reference logits of the fixture."""
    case = golden_prompts("llama")[1]
    driver = PagedDriver(load_model(folder, dtype="float32"))
    logits = driver.prefill({0: case["prompt"]})[0]
    np.testing.assert_allclose(logits, case["logits"], atol=2e-4, rtol=0)


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    check_logits(write(tmp_path, {k.removeprefix("model."): v for k, v in tensors().items()}))


def test_a_tie_stored_at_the_head(tmp_path: Path) -> None:
    weights = tensors()
    weights[HEAD] = weights.pop(EMBEDDING)
    check_logits(write(tmp_path, weights))


def test_a_base_model_with_the_tie_stored_at_the_head(tmp_path: Path) -> None:
    weights = {k.removeprefix("model."): v for k, v in tensors().items()}
    weights[HEAD] = weights.pop("embed_tokens.weight")
    check_logits(write(tmp_path, weights))


def test_two_ends_that_differ_are_not_tied(tmp_path: Path, caplog) -> None:
    """As transformers 5: what stands in the checkpoint is believed, not the configuration."""
    weights = tensors()
    weights[HEAD] = -weights[EMBEDDING]
    folder = write(tmp_path, weights)
    case = golden_prompts("llama")[1]
    model = load_model(folder, dtype="float32")
    logits = PagedDriver(model).prefill({0: case["prompt"]})[0]
    np.testing.assert_allclose(logits, -np.asarray(case["logits"]), atol=2e-4, rtol=0)
    assert not model.config.tie_word_embeddings and "are not tied" in caplog.text


BUFFERS = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.self_attn.rotary_emb.sin_cached",
    "model.layers.0.self_attn.rotary_emb.original_inv_freq",
    "model.rotary_emb.inv_freq",
    "model.rotary_pos_emb.inv_freq",
    "model.rope.freqs",
    "model.layers.1.self_attn.masked_bias",
    "model.embeddings.position_ids",
    "model.layers.1.self_attn._extra_state",
)


def test_buffers_carry_no_parameter(tmp_path: Path) -> None:
    check_logits(write(tmp_path, tensors() | {n: np.ones((1, 8), np.float32) for n in BUFFERS}))
    plain = {n.removeprefix("model."): np.ones(8, np.float32) for n in BUFFERS}
    bare = {k.removeprefix("model."): v for k, v in tensors().items()}
    check_logits(write(tmp_path, bare | plain))


def test_a_tensor_that_might_be_a_parameter_is_refused(tmp_path: Path) -> None:
    weights = tensors() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.self_attn\.q_proj\.b"):
        load_model(write(tmp_path, weights), dtype="float32")


# ---- files ---------------------------------------------------------------------------------------


def shard(folder: Path, count: int = 2, index: bool = True) -> dict[str, str]:
    """The fixture's weights over model-0000i-of-0000n.safetensors; returns the weight_map."""
    weights = tensors()
    places = {
        name: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors"
        for i, name in enumerate(sorted(weights))
    }
    for file in set(places.values()):
        save_file({n: w for n, w in weights.items() if places[n] == file}, folder / file)
    if index:
        write_index(folder, places)
    return places


def write_index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards_without_an_index(tmp_path: Path) -> None:
    shard(write(tmp_path, None), 3, index=False)
    check_logits(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks weight files: model-00002-of-00003"):
        load_model(tmp_path, dtype="float32")
    shutil.copy(
        tmp_path / "model-00001-of-00003.safetensors", tmp_path / "model-00001-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"shards of \['00002', '00003'\] files"):
        load_model(tmp_path, dtype="float32")


def test_a_stale_index_loses_to_the_whole_file(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    write_index(tmp_path, {"model.norm.weight": "model-00001-of-00009.safetensors"})
    check_logits(tmp_path)


def test_a_stale_shard_of_another_split_is_not_read(tmp_path: Path) -> None:
    shard(write(tmp_path, None), 2)
    wrong = {n: w + 1 for n, w in tensors().items()}
    save_file(wrong, tmp_path / "model-00001-of-00005.safetensors")
    check_logits(tmp_path)


def test_the_index_says_which_of_two_copies_counts(tmp_path: Path) -> None:
    places = shard(write(tmp_path, None), 2)
    name = "model.norm.weight"
    other = next(f for f in places.values() if f != places[name])
    save_file(load_file(tmp_path / other) | {name: np.zeros(64, np.float32)}, tmp_path / other)
    check_logits(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight stands in both"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("places", "match"),
    [
        (None, "has no weight_map"),
        ({}, "has no weight_map"),
        ({"a": 3}, r"weight_map\['a'\] must name a file"),
        ({"a": "../model.safetensors"}, "must name a file of this folder"),
        ({"a": "/etc/passwd"}, "must name a file of this folder"),
    ],
)
def test_malformed_indices(tmp_path: Path, places: object, match: str) -> None:
    write_index(write(tmp_path, None), places)
    with pytest.raises(CheckpointError, match=match):
        load_model(tmp_path, dtype="float32")


def test_pickled_weights_are_named(tmp_path: Path) -> None:
    (write(tmp_path, None) / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin must be conv"):
        load_model(tmp_path, dtype="float32")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ([1], "it is no JSON object"),
        ({"x": 3}, "tensor x has a damaged entry"),
        ({"x": {}}, "tensor x has dtype None"),
        ({"x": ENTRY | {"dtype": ["F32"]}}, "tensor x has dtype"),
        ({"x": ENTRY | {"shape": "2"}}, "tensor x has shape"),
        ({"x": ENTRY | {"shape": [-2, -1]}}, "tensor x has shape"),
        ({"x": ENTRY | {"shape": [2**40, 2**40]}}, "does not fit the file"),
        ({"x": ENTRY | {"data_offsets": [0]}}, "tensor x has shape"),
        ({"x": ENTRY | {"data_offsets": [8, 0]}}, "does not fit the file"),
        ({"x": ENTRY | {"data_offsets": [10**9, 10**9 + 8]}}, "does not fit the file"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: object, match: str) -> None:
    text = json.dumps(header).encode()
    write(tmp_path, None)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=match) as error:
        load_model(tmp_path, dtype="float32")
    assert str(tmp_path / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("length", [0, 2**63, 2**40])
def test_header_lengths(tmp_path: Path, length: int) -> None:
    write(tmp_path, None)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + bytes(64))
    with pytest.raises(CheckpointError, match="not a safetensors file or is truncated"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "512"),
        ("vocab_size", -1),
        ("vocab_size", 10**12),
        ("vocab_size", True),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 2.5),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("hidden_size", [64]),
        ("head_dim", {}),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "false"),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [["LlamaForCausalLM"]]),
        ("layer_types", 3),
        ("quantization_config", "fp8"),
        ("max_position_embeddings", 2**40),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}),
        ("eos_token_id", "x"),
        ("hidden_act", ["silu"]),
    ],
)
def test_malformed_configurations_name_file_and_key(
    tmp_path: Path, key: str, value: object
) -> None:
    folder = write(tmp_path, None, **{key: value})
    with pytest.raises(CheckpointError) as error:
        load_model(folder, dtype="float32", load_format="dummy")
    expected = "factor" if key == "rope_parameters" else key
    assert f"{folder / 'config.json'}: " in str(error.value) and expected in str(error.value)
