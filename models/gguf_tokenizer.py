"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json (built with the `tokenizers`
package)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type; 1 normal, 2 unknown, 5 unused, 6 byte

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _digits_then_bytes,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_then_bytes(_QWEN2_SPLIT),
}
"""tokenizer.ggml.pre -> how text is split before byte-pair merging."""

Get = Callable[..., Any]
"""Metadata lookup: get(key, default=None)."""


def write_tokenizer(get: Get, folder: Path) -> None:
    """Writes both files. ValueError naming the tokenizer model or pre-tokenizer when it is not
    supported."""
    tokenizer, add_bos = build_tokenizer(get)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tokenizer_config(get) | {"add_bos_token": add_bos}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def build_tokenizer(get: Get) -> tuple[Tokenizer, bool]:
    """(tokenizer, whether it puts BOS first)."""
    kind = get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"GGUF tokenizer model {kind!r} is not supported; supported: 'gpt2' (byte-level BPE),"
            " 'llama' (SentencePiece BPE)"
        )
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type") or []
    tokenizer = _byte_level_bpe(get, tokens) if kind == "gpt2" else _sentencepiece_bpe(get, tokens)
    _add_special(tokenizer, tokens, types)
    pre = get("tokenizer.ggml.pre", "")
    add_bos = bool(get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe"))
    bos = get("tokenizer.ggml.bos_token_id")
    add_bos = add_bos and bos is not None
    if add_bos:
        special = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
        byte_level = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
        tokenizer.post_processor = processors.Sequence([*byte_level, special])
    return tokenizer, add_bos


def tokenizer_config(get: Get) -> dict[str, Any]:
    """The special tokens' texts and the chat template, under tokenizer_config.json's names."""
    tokens = get("tokenizer.ggml.tokens")
    ids = {name: get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_IDS.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    if template := get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config | {
        "clean_up_tokenization_spaces": False,
        "model_max_length": get("{arch}.context_length"),
    }


_SPECIAL_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [(i, t) for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i, t in added if t == CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(tokens[i], special=False, normalized=False)
            for i, t in added
            if t == USER_DEFINED
        ]
    )


def _byte_level_bpe(get: Get, tokens: list[str]) -> Tokenizer:
    pre = get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF pre-tokenizer {pre!r} is not supported; supported: {sorted(PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece_bpe(get: Get, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE has scores in place of merges: two pieces merge in the order of their
    union's score."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = get("tokenizer.ggml.scores")
    unk = get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, scores),
        unk_token=tokens[unk],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    merges = []
    for piece, i in vocab.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted(
            ((vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab),
            key=lambda m: m[:2],
        )
        merges += [(-scores[i], a, b) for _, _, a, b in known]
    return [(a, b) for _, a, b in sorted(merges, key=lambda m: m[0])]
