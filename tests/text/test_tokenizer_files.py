"""Where a folder's tokens come from: transformers' choices, other sources than tokenizer.json, and
malformed files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
import tokenizers
from tokenizer_cases import CASES, TEXT, write
from tokenizers import pre_tokenizers

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.text.tokenizer import load_tokenizer

EXPECTED = json.loads(
    (Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case, expected = CASES[name], EXPECTED[name]
    write(tmp_path, case)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(case.get("text", TEXT))
    assert ids == expected["ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected["shown"]
    assert sorted(tokenizer.special_ids) == sorted(expected["special_ids"])
    assert tokenizer.special_tokens == expected["special_tokens"]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder must be an"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "must be a token id"),
        ({"tokenizer_config": {"added_tokens_decoder": {"9": {"id": 1}}}}, "with a content"),
        ({"tokenizer_config": {"bos_token": 3}}, "bos_token must be an object"),
        ({"tokenizer_config": {"extra_special_tokens": "x"}}, "extra_special_tokens must be a"),
        ({"tokenizer_config": {"extra_special_tokens": [3]}}, r"extra_special_tokens\[0\] must"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template must be text or a list"),
        ({"tokenizer_config": {"chat_template": [{"name": "x"}]}}, "a name and a template"),
        ({"special_tokens_map": {"eos_token": []}}, r"special_tokens_map\.json: eos_token"),
        ({"added_tokens": {"<x>": "9"}}, r"added_tokens\.json: '<x>' must have a token id"),
        ({"added_tokens": {"<x>": -1}}, "must have a token id"),
        ({"config": {"eos_token_id": [True]}}, r"config\.json: eos_token_id must be"),
        ({"config": {"text_config": 3, "eos_token_id": 2**40}}, "eos_token_id must be"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, files: dict, match: str) -> None:
    tiny.byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=match) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"a": ' * 100_000, b"\xff\xfe", b'{"a": 1e', b"null"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_is_one_kind_of_error(tmp_path: Path, name: str, content: bytes) -> None:
    tiny.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


def test_json_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    tiny.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(b'\xef\xbb\xbf{"bos_token": "<|im_start|>"}')
    assert load_tokenizer(tmp_path).bos_token_id == 256


def write_vocab(folder: Path, **config) -> None:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġhe"]
    (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nĠ he\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_vocab_and_merges_of_gpt2(tmp_path: Path) -> None:
    write_vocab(tmp_path, tokenizer_class="GPT2TokenizerFast")
    tokenizer = load_tokenizer(tmp_path)
    reference = tokenizers.ByteLevelBPETokenizer(
        str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    )
    for text in ("he he, the  hen's 1234\n\n x", "naïve 日本"):
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|endoftext|>") == [258] == list(tokenizer.eos_token_ids)


def test_vocab_and_merges_of_qwen(tmp_path: Path) -> None:
    """NFC first; digits one by one, whatever the merges say; the class may follow from config.json;
    add_bos_token counts here."""
    write_vocab(tmp_path, bos_token="<|im_start|>", add_bos_token=True)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 258}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert tokenizer.encode("he")[0] == 258 and tokenizer.encode("he")[1:] == [256]
    assert tokenizer.special_ids >= {258}


def test_vocab_and_merges_of_another_class_are_refused(tmp_path: Path) -> None:
    write_vocab(tmp_path, tokenizer_class="BartTokenizer")
    with pytest.raises(CheckpointError, match="tokenizer_class 'BartTokenizer'"):
        load_tokenizer(tmp_path)
    write_vocab(tmp_path)
    with pytest.raises(CheckpointError, match="model_type None"):
        load_tokenizer(tmp_path)
    write_vocab(tmp_path, tokenizer_class="GPT2Tokenizer")
    (tmp_path / "merges.txt").write_text("h e\nhe\n")
    with pytest.raises(CheckpointError, match=r"merges\.txt: line 2 must hold two pieces"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("h zz\n")
    with pytest.raises(CheckpointError, match=r"merges\.txt does not fit"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": "b"}')
    with pytest.raises(CheckpointError, match=r"vocab\.json: 'a' must have a token id"):
        load_tokenizer(tmp_path)


# ---- tokenizer.model -----------------------------------------------------------------------------

CORPUS = [
    "the quick brown fox jumps over the lazy dog 1234",
    "then the other fox jumped there too, didn't it?",
    "naïve café – 日本語",
    "  two  spaces\tand tabs",
] * 20
KINDS = {
    "bpe": dict(model_type="bpe", byte_fallback=True, user_defined_symbols=["<|u|>"]),
    "bpe without prefix": dict(model_type="bpe", byte_fallback=True, add_dummy_prefix=False),
    "unigram": dict(model_type="unigram", byte_fallback=True),
    "unigram, normalised": dict(
        model_type="unigram", normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True
    ),
}
TEXTS = (
    "the quick fox",
    " the  fox ",
    "日本 \U0001f98a x",
    "a<|u|>b",
    "",
    "tab\there\nnl",
    "naïve ﬁ",
    "▁the",
)


def train(folder: Path, **options) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    defaults = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=420 if options.get("byte_fallback") else 90,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        **{**defaults, **options},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentencepiece_model_encodes_as_its_library_does(tmp_path: Path, kind: str) -> None:
    train(tmp_path, **KINDS[kind])
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text), text
        ids = reference.encode(text)
        if 0 not in ids:  # unknown pieces have no text here
            assert tokenizer.decode(ids) == reference.decode(ids)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert {1, 2} <= tokenizer.special_ids and tokenizer.encode("<s>")[0] == 1


def test_ends_of_a_sentencepiece_model_are_the_configurations(tmp_path: Path) -> None:
    train(tmp_path, **KINDS["bpe"])
    plain = load_tokenizer(tmp_path).encode("the")
    config = {"add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("the") == [1, *plain, 2]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "yes"}')
    with pytest.raises(CheckpointError, match="add_bos_token must be true or false"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x0a\x05hello", b"\xff" * 50])
def test_a_damaged_sentencepiece_model_is_named(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)
