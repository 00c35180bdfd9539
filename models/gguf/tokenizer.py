"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json (built with the `tokenizers`
package)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.gguf.end_tokens import ALWAYS_SHOWN, end_token_ids, special_id
from deepinfer_jax.models.gguf.pre_tokenizers import PRE_TOKENIZERS, Pre
from deepinfer_jax.models.gguf.reader import GGUFFile

logger = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type; 1 normal, 5 unused, 6 byte
KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "gemma4": "BPE of whole pieces"}
_SPECIAL_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Writes both files. CheckpointError naming the tokenizer model or pre-tokenizer when it is not
    supported."""
    tokenizer, add_bos = build_tokenizer(file)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tokenizer_config(file) | {"add_bos_token": add_bos}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, bool]:
    """(tokenizer, whether it puts BOS first)."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in KINDS:
        raise file.fail("tokenizer.ggml.model", f"{kind!r} is not supported; supported: {KINDS}")
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens or len(set(tokens)) != len(tokens):
        raise file.fail("tokenizer.ggml.tokens", "must be distinct texts")
    pre = None if kind == "llama" else _pre(file, kind)
    try:
        tokenizer = _sentencepiece_bpe(file, tokens) if pre is None else _bpe(file, tokens, pre)
        _add_special(file, tokenizer, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # what the Rust side does not take
        raise file.fail("tokenizer.ggml.merges", f"cannot be used: {error}") from error
    by_default = pre is None or pre.add_bos
    add_bos = file.flag("tokenizer.ggml.add_bos_token", by_default)
    add_bos = add_bos and special_id(file, "bos") is not None
    _put_ends(file, tokenizer, tokens, add_bos, byte_level=pre is not None and not pre.whole)
    return tokenizer, add_bos


def _pre(file: GGUFFile, kind: str) -> Pre:
    name = "gemma4" if kind == "gemma4" else file.text("tokenizer.ggml.pre", "")
    if not name:
        logger.warning(
            "%s lacks tokenizer.ggml.pre: text is split as llama.cpp's 'default' does, which fits"
            " few models; convert it again with a newer converter",
            file.path,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise file.fail(
            "tokenizer.ggml.pre", f"{name!r} is not supported; supported: {sorted(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _put_ends(
    file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], add_bos: bool, byte_level: bool
) -> None:
    """BOS and EOS around a text, where the file says so."""
    eos = special_id(file, "eos") if file.flag("tokenizer.ggml.add_eos_token") else None
    bos = special_id(file, "bos") if add_bos else None
    used = [(tokens[i], i) for i in (bos, eos) if i is not None]
    if not used:
        return
    single = [tokens[bos]] if bos is not None else []
    single += ["$A"] + ([tokens[eos]] if eos is not None else [])
    special = processors.TemplateProcessing(single=single, special_tokens=used)
    first = [processors.ByteLevel(trim_offsets=False)] if byte_level else []
    tokenizer.post_processor = processors.Sequence([*first, special])


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The special tokens' texts and the chat templates, under tokenizer_config.json's names."""
    tokens = file.strings("tokenizer.ggml.tokens")
    ids = {name: special_id(file, key) for name, key in _SPECIAL_IDS.items()}
    config: dict[str, Any] = {
        name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)
    }
    templates = {"default": file.text("tokenizer.chat_template")}
    for name in file.get("tokenizer.chat_templates") or ():
        templates[str(name)] = file.text(f"tokenizer.chat_template.{name}")
    named = [{"name": k, "template": v} for k, v in templates.items() if v is not None]
    if len(named) == 1 and named[0]["name"] == "default":
        config["chat_template"] = templates["default"]
    elif named:
        config["chat_template"] = named
    return config | {
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer("{arch}.context_length"),
    }


def _add_special(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens, and those that end a generation whatever their type, are special; those of
    the user are matched whole and shown."""
    types = file.get("tokenizer.ggml.token_type") or []
    if not isinstance(types, list) or (types and len(types) < len(tokens)):
        raise file.fail("tokenizer.ggml.token_type", f"must have {len(tokens)} entries")
    ends = set(end_token_ids(file))
    added = []
    for i, text in enumerate(tokens):
        kind = types[i] if types else None
        special = i in ends or kind in (CONTROL, UNKNOWN)
        shown = kind == USER_DEFINED or text in ALWAYS_SHOWN
        if special or shown:
            mark = special and (text not in ALWAYS_SHOWN or i in ends)
            added.append(AddedToken(text, special=mark, normalized=False))
    tokenizer.add_tokens(added)


def _bpe(file: GGUFFile, tokens: list[str], pre: Pre) -> Tokenizer:
    merges = [_pair(file, merge) for merge in file.strings("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        fuse_unk=False,
        byte_fallback=pre.whole,
        ignore_merges=pre.ignore_merges,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre.pre_tokenizer()
    if pre.whole:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    """ "a b" -> ("a", "b"); a piece may begin with a space of its own where pieces are whole."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise file.fail("tokenizer.ggml.merges", f"{merge!r} is not a pair")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE has scores in place of merges: two pieces merge in the order of their
    union's score."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = file.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise file.fail("tokenizer.ggml.scores", f"must have {len(tokens)} entries")
    unknown = special_id(file, "unknown") or 0
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
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
