"""GGUF models written here from the golden fixtures, then converted back and run."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
from paged_driver import GOLDEN, PagedDriver, golden_prompts
from safetensors.numpy import load_file
from tokenizers import (
    SentencePieceBPETokenizer,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from deepinfer_jax.models.gguf import GGUFFile
from deepinfer_jax.models.gguf.cache import cached_folder
from deepinfer_jax.models.gguf.tensors import unpermute
from deepinfer_jax.models.gguf.tokenizer import build_tokenizer
from deepinfer_jax.models.layers.rope import RopeConfig, inv_frequencies
from deepinfer_jax.models.loading import load_generation_config, load_hf_config, load_model
from deepinfer_jax.models.resolve import resolve_model_path

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GLOBALS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k for the llama architecture."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox 1234 jumps over the lazy dog, don't it?"] * 4, trainer
    )
    return tokenizer


def write_gguf(
    path: Path,
    fixture: str,
    *,
    arch: str = "llama",
    extra=lambda writer: None,
    tokenizer: Tokenizer | None = None,
) -> None:
    config = json.loads((GOLDEN / fixture / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    state = json.loads((tokenizer or byte_level_tokenizer()).to_str())
    vocab = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges([" ".join(m) for m in state["model"]["merges"]])
    writer.add_chat_template("{{ messages[0].content }}")
    extra(writer)
    for name, value in load_file(GOLDEN / fixture / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        if stem in GLOBALS:
            writer.add_tensor(f"{GLOBALS[stem]}.{kind}", value)
            continue
        _, _, layer, part = stem.split(".", 3)
        if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            value = permute(value, heads if "q_proj" in part else kv_heads)
        writer.add_tensor(f"blk.{layer}.{NAMES[part]}.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_freqs(writer: gguf.GGUFWriter) -> None:
    scaled = RopeConfig(16, 500000.0, "llama3", factor=8.0, original_max_position=8192)
    plain = RopeConfig(16, 500000.0)
    writer.add_tensor("rope_freqs.weight", inv_frequencies(plain) / inv_frequencies(scaled))


@pytest.mark.parametrize(("fixture", "arch"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_converted_model_has_the_reference_logits(tmp_path: Path, fixture: str, arch: str) -> None:
    """qwen2's window is dropped by GGUF, so only prompts shorter than it are compared."""
    write_gguf(tmp_path / "m.gguf", fixture, arch=arch)
    case = golden_prompts(fixture)[1 if fixture == "llama" else 0]
    driver = PagedDriver(load_model(tmp_path / "m.gguf", dtype="float32"))
    np.testing.assert_allclose(
        driver.prefill({0: case["prompt"]})[0], case["logits"], atol=2e-4, rtol=0
    )


def test_config_and_generation_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    config, reference = (
        load_hf_config(tmp_path / "m.gguf"),
        json.loads((GOLDEN / "llama" / "config.json").read_text()),
    )
    for key in (
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
    ):
        assert config[key] == reference[key], key
    assert load_generation_config(tmp_path / "m.gguf") == {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_rope3", extra=llama3_freqs)
    rope = load_hf_config(tmp_path / "m.gguf")["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == (
        "llama3",
        8.0,
        8192,
    )
    write_gguf(
        tmp_path / "n.gguf",
        "llama_rope3",
        extra=lambda w: w.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32)),
    )
    other = RopeConfig.from_hf(load_hf_config(tmp_path / "n.gguf"))
    plain = inv_frequencies(RopeConfig(16, 500000.0))
    np.testing.assert_allclose(inv_frequencies(other), plain / np.arange(1, 9), rtol=1e-6)
    assert other.cos_sin_scale == 1.0


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    original = byte_level_tokenizer()
    write_gguf(tmp_path / "m.gguf", "llama", tokenizer=original)
    folder = resolve_model_path(tmp_path / "m.gguf")
    rebuilt = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("the fox, 1234!", " don't  it?\n\n", "naïve 日本 \U0001f600", "<s>the</s>"):
        assert rebuilt.encode(text).ids == original.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == (
        "<s>",
        "</s>",
        False,
    )
    assert config["chat_template"] == "{{ messages[0].content }}"


def test_sentencepiece_scores_become_merges(tmp_path: Path) -> None:
    """A BPE trained with merges, exported as SentencePiece scores (minus the merge's rank), encodes
    the same afterwards."""
    corpus = [
        "the quick brown fox jumps over the lazy dog",
        "then the other fox jumped there too, didn't it?",
    ] * 4
    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator(
        corpus, vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    state = json.loads(trained.to_str())["model"]
    rank = {"".join(merge): i for i, merge in enumerate(state["merges"])}
    size = len(state["vocab"])
    tokens = sorted(state["vocab"], key=state["vocab"].get) + [
        f"<0x{byte:02X}>" for byte in range(256)
    ]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 0)) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (size - 3) + [6] * 256,
        "tokenizer.ggml.bos_token_id": 1,
    }
    own = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    gguf_files.write(
        tmp_path / "m.gguf", tokenizer={"pre": None, "merges": None, **own}, tensors={}
    )
    rebuilt, add_bos = build_tokenizer(GGUFFile(tmp_path / "m.gguf"))
    assert add_bos
    for text in ("the quick fox", "then there  the dog jumped"):
        ids = rebuilt.encode(text).ids
        assert ids == [1, *trained.encode(text).ids]
        assert rebuilt.decode(ids) == text
    assert rebuilt.decode(rebuilt.encode("fox \U0001f98a").ids) == "fox \U0001f98a"


def test_unsupported_files_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", arch="gptneox")
    with pytest.raises(ValueError, match="architecture 'gptneox'"):
        load_hf_config(tmp_path / "a.gguf")
    write_gguf(
        tmp_path / "b.gguf",
        "llama",
        extra=lambda w: w.add_tensor("blk.0.strange.weight", np.ones(4, np.float32)),
    )
    with pytest.raises(ValueError, match=r"blk\.0\.strange\.weight"):
        load_hf_config(tmp_path / "b.gguf")
    write_gguf(tmp_path / "c.gguf", "llama", extra=lambda w: w.add_expert_count(4))
    with pytest.raises(ValueError, match=r"llama\.expert_count: not supported"):
        load_hf_config(tmp_path / "c.gguf")
    (tmp_path / "d.gguf").write_bytes(b"not gguf at all")
    with pytest.raises(ValueError, match="not a readable GGUF"):
        load_hf_config(tmp_path / "d.gguf")
    with pytest.raises(ValueError, match="no such file"):
        load_hf_config(tmp_path / "e.gguf")
    assert not list((tmp_path / "cache" / "models").glob("*.partial"))


def test_unpermute_undoes_llama_cpps_order() -> None:
    rows = np.arange(4 * 16 * 3).reshape(64, 3)
    np.testing.assert_array_equal(unpermute(permute(rows, 4), 4), rows)


def _fill_slowly(folder: Path) -> None:
    with (folder.parent / "fills").open("a") as log:
        log.write("x")
    for i in range(50):
        (folder / f"{i}").write_text("x" * 1000)


def _fetch(barrier, queue) -> None:
    barrier.wait()
    folder = cached_folder("shared", _fill_slowly)
    queue.put(len(list(folder.iterdir())))


def test_two_processes_convert_once() -> None:
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_fetch, args=(barrier, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert counts == [50, 50]
    assert (cached_folder("shared", _fill_slowly).parent / "fills").read_text() == "x"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_folder("broken", fail)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == ["broken-v2.lock"]
