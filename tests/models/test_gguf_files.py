"""GGUF metadata as llama.cpp reads it: rope keys, end tokens, pre-tokenizers, split files, experts;
what is unknown or damaged is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import gguf_files
import jax
import numpy as np
import pytest
from gguf_files import BYTES
from paged_driver import GOLDEN
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.gguf import GGUFFile
from deepinfer_jax.models.gguf.config import hf_config
from deepinfer_jax.models.gguf.end_tokens import end_token_ids
from deepinfer_jax.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from deepinfer_jax.models.gguf.tokenizer import build_tokenizer, tokenizer_config
from deepinfer_jax.models.layers.rope import RopeConfig, inv_frequencies
from deepinfer_jax.models.loading import load_hf_config, load_model, read_model_config
from deepinfer_jax.models.resolve import resolve_model_path

HEAD_DIM = gguf_files.HIDDEN // gguf_files.HEADS
SCALING = "rope.scaling"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))


def rope_of(path: Path, metadata: dict, tensors: dict | None = None) -> RopeConfig:
    given = gguf_files.dense_tensors(259) | (tensors or {})
    gguf_files.write(path, metadata=metadata, tensors=given)
    return RopeConfig.from_hf(hf_config(GGUFFile(path)))


# ---- rope ----------------------------------------------------------------------------------------

PLAIN = inv_frequencies(RopeConfig(HEAD_DIM))
YARN = {
    f"{SCALING}.type": "yarn",
    f"{SCALING}.factor": 4.0,
    f"{SCALING}.original_context_length": 64,
}


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({}, 1.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({f"{SCALING}.factor": 4.0}, 4.0),
        ({f"{SCALING}.type": "linear", f"{SCALING}.factor": 4.0}, 4.0),
        ({f"{SCALING}.type": "linear", "rope.scale_linear": 4.0}, 4.0),
        ({f"{SCALING}.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({f"{SCALING}.type": "none", f"{SCALING}.factor": 4.0}, 1.0),
        ({f"{SCALING}.type": "none", "rope.scale_linear": 4.0}, 1.0),
        ({f"{SCALING}.type": "linear"}, 1.0),
        ({f"{SCALING}.factor": 0.0}, 1.0),
    ],
)
def test_a_factor_is_linear_unless_its_type_says_otherwise(
    tmp_path: Path, metadata: dict, factor: float
) -> None:
    rope = rope_of(tmp_path / "m.gguf", metadata)
    np.testing.assert_allclose(inv_frequencies(rope), PLAIN / factor, rtol=1e-6)
    assert rope.cos_sin_scale == 1.0


def test_yarn_keys(tmp_path: Path) -> None:
    """cos and sin times attn_factor * (0.1 ln factor + 1), as llama.cpp computes it."""
    path = tmp_path / "m.gguf"
    rope = rope_of(path, YARN)
    assert rope == RopeConfig(HEAD_DIM, 10000.0, "yarn", 4.0, 64)
    scaled = rope_of(path, YARN | {f"{SCALING}.attn_factor": 0.5})
    assert scaled.cos_sin_scale == pytest.approx(0.5 * (0.1 * math.log(4) + 1), rel=1e-6)
    np.testing.assert_array_equal(inv_frequencies(scaled), inv_frequencies(rope))
    betas = {f"{SCALING}.yarn_beta_fast": 16.0, f"{SCALING}.yarn_beta_slow": 2.0}
    assert rope_of(path, YARN | betas) == RopeConfig(
        HEAD_DIM, 10000.0, "yarn", 4.0, 64, beta_fast=16.0, beta_slow=2.0
    )
    old = {f"{SCALING}.type": "yarn", "rope.scale_linear": 4.0}  # the length is the context's then
    assert rope_of(path, old) == RopeConfig(HEAD_DIM, 10000.0, "yarn", 4.0, 256)


def test_attn_factor_of_linear_scaling(tmp_path: Path) -> None:
    rope = rope_of(tmp_path / "m.gguf", {f"{SCALING}.factor": 4.0, f"{SCALING}.attn_factor": 0.5})
    np.testing.assert_allclose(inv_frequencies(rope), PLAIN / 4, rtol=1e-6)
    assert rope.cos_sin_scale == pytest.approx(0.5)


def test_divisors_of_every_frequency(tmp_path: Path) -> None:
    divisors = np.array([1, 1.5, 3, 8], np.float32)
    path = tmp_path / "m.gguf"
    for kind, tensors in (
        ("linear", {"rope_freqs.weight": divisors}),
        ("longrope", {"rope_factors_long.weight": divisors, "rope_factors_short.weight": divisors}),
        ("longrope", {"rope_factors_long.weight": divisors}),
    ):
        rope = rope_of(path, {f"{SCALING}.type": kind, f"{SCALING}.attn_factor": 1.25}, tensors)
        np.testing.assert_allclose(inv_frequencies(rope), PLAIN / divisors, rtol=1e-6)
        assert rope.cos_sin_scale == pytest.approx(1.25)
    rope = rope_of(path, {f"{SCALING}.factor": 2.0}, {"rope_freqs.weight": divisors})
    np.testing.assert_allclose(inv_frequencies(rope), PLAIN / divisors / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({f"{SCALING}.type": "su"}, r"llama\.rope\.scaling\.type: 'su'"),
        ({f"{SCALING}.type": "longrope"}, "'longrope' without"),
        ({f"{SCALING}.factor": -1.0}, r"rope\.scaling\.factor: must not be negative"),
        ({f"{SCALING}.factor": float("nan")}, r"rope\.scaling\.factor: must be finite"),
        ({f"{SCALING}.factor": "4"}, r"rope\.scaling\.factor: must be a number"),
        ({f"{SCALING}.attn_factor": 0.0}, r"attn_factor: must be positive"),
        ({f"{SCALING}.alpha": 2.0}, r"rope\.scaling\.alpha: not supported"),
        (YARN | {f"{SCALING}.yarn_ext_factor": 0.5}, "yarn_ext_factor: 0.5"),
        (YARN | {f"{SCALING}.yarn_attn_factor": 2.0}, "yarn_attn_factor: 2.0"),
        (YARN | {f"{SCALING}.yarn_log_multiplier": 0.1}, "yarn_log_multiplier: 0.1"),
        ({"rope.dimension_count": 4}, "rotating 4 of 8"),
        ({"rope.dimension_sections": [4, 4]}, r"rope\.dimension_sections: not supported"),
        ({"attention.sliding_window": 100}, r"attention\.sliding_window: not supported"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"something.new": 1}, r"llama\.something\.new"),
        ({".tokenizer.ggml.suppress_tokens": [3]}, r"tokenizer\.ggml\.suppress_tokens"),
        ({".general.type": "adapter"}, r"general\.type: must be 'model'"),
        ({"block_count": None}, r"lacks llama\.block_count"),
        ({"block_count": "2"}, r"llama\.block_count: must be a whole number"),
        ({"attention.head_count": [4, 2]}, "differs between layers"),
        ({"attention.head_count": 0}, r"head_count: must be positive"),
        ({"attention.value_length": 4}, "value_length: 4 differs"),
    ],
)
def test_what_would_change_results_is_refused(tmp_path: Path, metadata: dict, match: str) -> None:
    gguf_files.write(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=match) as error:
        load_hf_config(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(error.value)


def test_what_is_off_or_says_nothing_is_taken(tmp_path: Path) -> None:
    metadata = {
        "attn_logit_softcapping": 0.0,
        "logit_scale": 1.0,
        "attention.causal": True,
        "attention.sliding_window": 4096,
        "attention.head_count": [4, 4],
        "expert_count": 0,
        f"{SCALING}.finetuned": True,
        ".general.name": "x",
        ".quantize.imatrix.file": "x",
        ".tokenizer.ggml.fim_pre_token_id": 3,
    }
    gguf_files.write(tmp_path / "m.gguf", metadata=metadata)
    assert load_hf_config(tmp_path / "m.gguf")["num_attention_heads"] == 4


# ---- tokens --------------------------------------------------------------------------------------


def tokenizer_of(path: Path, **options) -> tuple[GGUFFile, Tokenizer, list[str]]:
    tokens = gguf_files.write(path, tensors={}, **options)
    file = GGUFFile(path)
    return file, build_tokenizer(file)[0], tokens


@pytest.mark.parametrize(
    ("special", "keys", "ends"),
    [
        (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), {"eos": 1}, (1, 2)),
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), {"eos": 0}, (0, 2)),
        (("<bos>", "<eos>", "<end_of_turn>"), {"eos": 1}, (1, 2)),
        (("x", "y", "z"), {"eos": 2, "eot": 0, "eom": 1}, (2, 0, 1)),
        (("x", "<|eom_id|>", "<|eot_id|>"), {}, (1, 2)),
        (("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "x"), {"eos": 3}, (3, 0, 1, 2)),
        (("a", "b"), {"eos": 0, "fim_pad": 1}, (0, 1)),
        (("<|return|>", "<|call|>", "<|end|>"), {"eos": 0}, (0, 1)),
        (("<|flush|>", "<|calls|>", "<|end|>"), {"eos": 0}, (0, 1)),
        (("<|end|>", "<|call|>"), {"eos": 0}, (0, 1)),
        (("<eos>", "</s>", "<|tool_response>"), {"eos": 0}, (0, 2)),
        (("<｜end▁of▁sentence｜>", "[e~[", "[EOT]"), {"eos": 0}, (0, 1, 2)),
    ],
)
def test_ends_of_a_generation_by_key_and_by_text(
    tmp_path: Path, special: tuple, keys: dict, ends: tuple
) -> None:
    own = {f"{name}_token_id": 257 + i for name, i in keys.items()}
    gguf_files.write(tmp_path / "m.gguf", special=special, tokenizer=own, tensors={})
    found = end_token_ids(GGUFFile(tmp_path / "m.gguf"))
    assert found[: len(keys)] == [257 + i for i in ends[: len(keys)]]
    assert sorted(found) == sorted(257 + i for i in ends)


def test_an_end_is_special_whatever_its_type(tmp_path: Path) -> None:
    special = ("<|im_end|>", "<think>", "<|channel|>", "<unk>")
    types = {"<|im_end|>": 1, "<think>": 4, "<|channel|>": 3, "<unk>": 2}
    _, tokenizer, _ = tokenizer_of(tmp_path / "m.gguf", special=special, types=types)
    ids = tokenizer.encode("".join(special)).ids
    assert ids == [257, 258, 259, 260]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think><|channel|>"


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"pre": "llama-bpe", "bos_token_id": 257}, [257, 64]),
        ({"pre": "tekken", "bos_token_id": 257}, [257, 64]),
        ({"pre": "llama-bpe", "bos_token_id": 257, "add_bos_token": False}, [64]),
        ({"pre": "llama-bpe"}, [64]),
        ({"pre": "qwen2", "bos_token_id": 257}, [64]),
        ({"pre": "qwen2", "bos_token_id": 257, "add_bos_token": True}, [257, 64]),
        ({"pre": "qwen2", "eos_token_id": 258, "add_eos_token": True}, [64, 258]),
    ],
)
def test_bos_and_eos_around_a_text(tmp_path: Path, tokenizer: dict, expected: list[int]) -> None:
    _, built, _ = tokenizer_of(tmp_path / "m.gguf", tokenizer=tokenizer)
    assert built.encode("a").ids == expected


def test_a_missing_pre_tokenizer_warns(tmp_path: Path, caplog) -> None:
    _, tokenizer, _ = tokenizer_of(tmp_path / "m.gguf", tokenizer={"pre": None})
    assert "lacks tokenizer.ggml.pre" in caplog.text
    splits = tokenizer.pre_tokenizer.pre_tokenize_str("ab 12345,c")
    assert [s for s, _ in splits] == ["ab", "Ġ", "123", "45", ",", "c"]


SPLITS = {
    "llama-bpe": ("I'VE 12345 x\n\n y", "I|'VE| |123|45| x|\n\n| y"),
    "qwen2": ("I'VE 123 x\n\n y", "I|'VE| |1|2|3| x|\n\n| y"),
    "gpt-2": ("I've 123  x!", "I|'ve| 123| | x|!"),
    "smollm": ("ab 123", "ab| |1|2|3"),
    "falcon": ("a+b 12345", "a|+|b| |123|45"),
    "deepseek-v3": ("a中文12345 .x", "a|中文|123|45| .|x"),
    "deepseek-coder": ("a b,12\n", "a| b|,|1|2|\n"),
    "deepseek-llm": ("ab 中文 12\n", "ab| |中文| |12|\n"),
    "tekken": ("HelloWorld 12", "Hello|World| |1|2"),
    "gpt-4o": ("HelloWORLD's 1234", "Hello|WORLD's| |123|4"),
    "kimi-k2": ("中文ab1234", "中文|ab|123|4"),
    "afmoe": ("12345 中x", "12|345| |中|x"),
    "superbpe": ("12345678 a b", "12|345|678| a b"),
    "tiny_aya": ("12345", "12|345"),
    "bloom": ("ab, cd", "ab|,| cd"),
    "viking": ("ab 12", "ab| |1|2"),
    "minicpm5": ("12345 a", "123|45| a"),
    "bailingmoe": ("I'm 12", "I|'m| |1|2"),
    "ufakzeka": ("I'm 12", "I|'m| |1|2"),
    "exaone-moe": ("a b c1", "a b c|1"),
    "qwen35": ("e\u0301x1", "\u00e9x|1"),
    "poro-chat": ("a b.", "a| b|."),
    "jais-2": ("a    b", "a|  | | b"),
    "seed-coder": ("a!\n", "a|!|\n"),
    "youtu": ("가a1", "가|a|1"),
    "chameleon": ("a1,", "a|1|,"),
    "laguna": ("a\nb1", "a|\n|b|1"),
    "spark2_5": ("12345.\n", "1|2|3|4|5|.|\n"),
    "granite-embed-multi-97m": ("AbC", "Ab|C"),
    "stablelm2": ("a1", "a|1"),
    "dbrx": ("a1234", "a|123|4"),
    "default": ("a+12345", "a|+|123|45"),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_splits_and_loses_nothing(tmp_path: Path, name: str) -> None:
    _, tokenizer, _ = tokenizer_of(tmp_path / "m.gguf", tokenizer={"pre": name})
    if name in SPLITS:
        text, pieces = SPLITS[name]
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
        assert "|".join(normal[a:b] for a, b in spans) == pieces
    if not PRE_TOKENIZERS[name].whole:
        for text in ("He said: I'll pay $1,234.50\r\n\tnaïve 日本 \U0001f98a  ", "\n\n x  y"):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


ALIASES = """
llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano phi-2 gigachat a.x-4.0 mellum
mpt olmo jais trillion exaone exaone4 starcoder refact command-r codeshell minerva-7b mellum2
deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2 glm4 chatglm-bpe smaug-bpe
gpt3-finnish llama4 kanana2 talkie minimax-m2 cohere2moe hunyuan-dense hy_v4 joyai-llm bailingmoe2
llada-moe granite-docling gemma4 sarvam-moe
"""


def test_llama_cpps_names_of_pre_tokenizers_are_there() -> None:
    assert set(ALIASES.split()) <= PRE_TOKENIZERS.keys()


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model: 'bert'"),
        ({"pre": "whitespace"}, r"tokenizer\.ggml\.pre: 'whitespace'"),
        ({"tokens": ["a", "a"]}, "must be distinct"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens: must be a list of texts"),
        ({"merges": ["he"]}, r"merges: 'he' is not a pair"),
        ({"merges": ["h zz"]}, r"tokenizer\.ggml\.merges: cannot be used"),
        ({"token_type": [1]}, r"token_type: must have 259 entries"),
        ({"eos_token_id": 999}, r"eos_token_id: 999 is not one of 259 tokens"),
        ({"add_bos_token": 1}, "add_bos_token: must be true or false"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores: must have 259"),
    ],
)
def test_malformed_tokenizers_are_named(tmp_path: Path, tokenizer: dict, match: str) -> None:
    gguf_files.write(tmp_path / "m.gguf", tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match=match):
        resolve_model_path(tmp_path / "m.gguf")


def test_named_chat_templates(tmp_path: Path) -> None:
    metadata = {
        ".tokenizer.chat_template": "plain",
        ".tokenizer.chat_templates": ["tool_use"],
        ".tokenizer.chat_template.tool_use": "tools",
    }
    gguf_files.write(tmp_path / "m.gguf", metadata=metadata, tensors={})
    assert tokenizer_config(GGUFFile(tmp_path / "m.gguf"))["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


# ---- several files, experts ----------------------------------------------------------------------


def test_a_split_model_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf")
    gguf_files.write(tmp_path / "s.gguf", split=5)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert len(parts) > 2
    whole = load_model(tmp_path / "m.gguf", dtype="float32").params
    for part in (parts[0], parts[-1]):
        split = load_model(part, dtype="float32").params
        assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), whole, split))
    kept = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {parts[1].name}"):
        resolve_model_path(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.no 2"):
        resolve_model_path(parts[0])
    parts[1].write_bytes(kept)
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"its name says part 1 of 1"):
        resolve_model_path(tmp_path / "renamed.gguf")


DENSE_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def expert_tensors(folder: Path, config: dict, halves: bool) -> dict[str, np.ndarray]:
    """A fixture's tensors under llama.cpp's names: experts stacked; halves: kv_b_proj in two."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    shards = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    for name, value in (item for shard in shards for item in shard.items()):
        stem, _, kind = name.rpartition(".")
        if stem in GLOBAL_NAMES:
            found[f"{GLOBAL_NAMES[stem]}.{kind}"] = value
            continue
        _, _, layer, part = stem.split(".", 3)
        if int(layer) >= config["num_hidden_layers"]:
            continue  # a draft layer, which llama.cpp's converter leaves out
        if part.startswith("mlp.experts."):
            _, _, expert, which = part.split(".")
            stack = stacks.setdefault(f"blk.{layer}.ffn_{which[:-5]}_exps.weight", {})
            stack[int(expert)] = value
        elif kind == "e_score_correction_bias":
            found[f"blk.{layer}.exp_probs_b.bias"] = value
        elif part == "self_attn.kv_b_proj" and halves:
            nope = config["qk_nope_head_dim"]
            heads = value.reshape(config["num_attention_heads"], -1, value.shape[1])
            keys = np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2))
            found[f"blk.{layer}.attn_k_b.weight"] = keys
            found[f"blk.{layer}.attn_v_b.weight"] = np.ascontiguousarray(heads[:, nope:])
        else:
            found[f"blk.{layer}.{DENSE_NAMES[part]}.{kind}"] = value
    return found | {n: np.stack([s[e] for e in sorted(s)]) for n, s in stacks.items()}


def expert_metadata(config: dict, halves: bool) -> dict:
    common = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    if config["model_type"] == "qwen3_moe":
        return common | {
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "expert_count": config["num_local_experts"],
        }
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    lengths = {"attention.key_length": key, "attention.value_length": value}
    if halves:  # as newer converters write it: the compressed lengths, and one kv head
        lengths = {
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "attention.key_length_mla": key,
            "attention.value_length_mla": value,
        }
    common |= lengths | {
        "attention.head_count_kv": 1 if halves else config["num_attention_heads"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config["first_k_dense_replace"],
    }
    if config["n_group"] > 1:
        groups = (config["n_group"], config["topk_group"])
        common |= dict(zip(("expert_group_count", "expert_group_used_count"), groups, strict=True))
    if config["model_type"] == "deepseek_v3":
        common |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    parameters = config["rope_parameters"]
    if parameters["rope_type"] == "yarn":
        common |= {
            f"{SCALING}.type": "yarn",
            f"{SCALING}.factor": parameters["factor"],
            f"{SCALING}.original_context_length": parameters["original_max_position_embeddings"],
            f"{SCALING}.yarn_log_multiplier": 0.1 * parameters["mscale_all_dim"],
        }
    return common


@pytest.mark.parametrize("halves", [False, True], ids=["kv_b", "k_b and v_b"])
@pytest.mark.parametrize(
    "fixture", ["qwen3_moe", "deepseek_v2_lite", "deepseek_v2_groups", "deepseek_v3_yarn"]
)
def test_experts_are_those_of_the_folder(tmp_path: Path, fixture: str, halves: bool) -> None:
    """The parameters and the configuration of the original, whose logits other tests check."""
    folder = GOLDEN / fixture
    config = json.loads((folder / "config.json").read_text())
    tokens = [*BYTES, "he", *(f"t{i}" for i in range(config["vocab_size"] - 257))]
    gguf_files.write(
        tmp_path / "m.gguf",
        arch="qwen3moe" if fixture == "qwen3_moe" else "deepseek2",
        metadata=dict.fromkeys(gguf_files.BASE) | expert_metadata(config, halves),
        tokenizer={"tokens": tokens, "token_type": None, "eos_token_id": 1},
        tensors=expert_tensors(folder, config, halves),
    )
    converted = resolve_model_path(tmp_path / "m.gguf")
    _, expected = read_model_config(folder)
    _, got = read_model_config(converted)
    own = {"bos_token_id": None, "eos_token_ids": (), "mtp_layers": 0, "model_type": ""}
    fields = {f.name for f in dataclasses.fields(expected)}
    own = {k: v for k, v in own.items() if k in fields}
    assert dataclasses.replace(got, **own) == dataclasses.replace(expected, **own)
    original, read = (load_model(f, dtype="float32").params for f in (folder, converted))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), original, read))


# ---- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b[:3], "it begins with"),
        (lambda b: b"", "cannot mmap|empty"),
        (lambda b: b"GGUF" + (1).to_bytes(4, "little") + b[8:], "version 1"),
        (lambda b: b"GGUF" + (3).to_bytes(4, "big") + b[8:], "little endian"),
        (lambda b: b[:8] + b"\xff" * 8 + b[16:], "is said to have"),
        (lambda b: b[:16] + b"\xff" * 8 + b[24:], "is said to have"),
        (lambda b: b[:24] + b"\xff" * 8 + b[32:], "is said to have .* bytes"),
        (lambda b: b[:2000], "ends within|is said to have"),
        (lambda b: b[:-100], "it is truncated"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change, match: str) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=match) as error:
        resolve_model_path(path)
    assert str(path) in str(error.value)
    assert not list((tmp_path / "cache" / "models").glob("*.partial"))


def test_an_unwritable_cache_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_files.write(tmp_path / "m.gguf")
    (tmp_path / "taken").touch()
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "taken" / "below"))
    with pytest.raises(OSError, match="DEEPINFER_CACHE_DIR may name one"):
        resolve_model_path(tmp_path / "m.gguf")
