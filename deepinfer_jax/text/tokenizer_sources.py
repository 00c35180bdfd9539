"""Tokenizers of folders without tokenizer.json: vocab.json with merges.txt, or tokenizer.model.

A tokenizer.model is SentencePiece's: it is read with that library (the extra "sentencepiece") and
becomes a `tokenizers` tokenizer that encodes as SentencePiece does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from deepinfer_jax.model_files import CheckpointError, read_json, read_json_if_there

_END = "<|endoftext|>"
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLASSES = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END),
}
"""tokenizer_class -> its special tokens where the configuration names none."""
_BY_MODEL = {"gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # a piece's type; 2 unknown, 5 unused, 6 byte


@dataclass(frozen=True)
class Built:
    """A tokenizer, the file it was made of, and the special tokens that file names."""

    backend: tokenizers.Tokenizer
    file: Path
    special: dict[str, str]


def build_backend(folder: Path, config: Mapping[str, Any]) -> Built | None:
    """None where the folder has no tokenizer. Raises CheckpointError naming the file."""
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder, config)
    if (folder / "tokenizer.model").is_file():
        return _sentencepiece(folder / "tokenizer.model", bool(config.get("legacy", True)))
    return None


# ---- vocab.json and merges.txt -------------------------------------------------------------------


def _byte_level(folder: Path, config: Mapping[str, Any]) -> Built:
    """Byte-level BPE; the tokenizer's class says how text is split before it."""
    name = str(config.get("tokenizer_class") or _class_of_model(folder)).removesuffix("Fast")
    if name not in _CLASSES:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class {name!r} with vocab.json and"
            f" merges.txt is not supported; supported: {sorted(_CLASSES)} (or a tokenizer.json)"
        )
    file = folder / "vocab.json"
    vocab = read_json(file)
    if bad := next((k for k, i in vocab.items() if type(i) is not int or i < 0), None):
        raise CheckpointError(f"{file}: {bad!r} must have a token id, got {vocab[bad]!r}")
    try:
        model = models.BPE(vocab=vocab, merges=_read_merges(folder / "merges.txt"))
    except Exception as error:  # a merge of pieces that the vocabulary lacks
        raise CheckpointError(f"{folder / 'merges.txt'} does not fit {file}: {error}") from error
    backend = tokenizers.Tokenizer(model)
    space = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    if name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    backend.decoder = decoders.ByteLevel()
    return Built(backend, file, dict(_CLASSES[name]))


def _class_of_model(folder: Path) -> str:
    model_type = read_json_if_there(folder / "config.json").get("model_type")
    return _BY_MODEL.get(str(model_type), f"(none, model_type {model_type!r})")


def _read_merges(file: Path) -> list[tuple[str, str]]:
    """One pair a line, after a line `#version: ...`."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8: {error}") from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.rstrip("\r").split(" "))
        if len(pair) != 2:
            raise CheckpointError(f"{file}: line {number} must hold two pieces, got {line!r}")
        merges.append(pair)
    return merges


# ---- tokenizer.model -----------------------------------------------------------------------------


def _sentencepiece(file: Path, legacy: bool) -> Built:
    proto = _read_proto(file)
    pieces = [p.piece for p in proto.pieces]
    if len(set(pieces)) != len(pieces) or not pieces:
        raise CheckpointError(f"{file} has no vocabulary of distinct pieces")
    own = [p.piece for p in proto.pieces if p.type == _USER_DEFINED]
    trainer = proto.trainer_spec
    try:
        model = _unigram(proto) if trainer.model_type == 1 else _bpe(proto, bool(own))
    except Exception as error:  # what the Rust side does not take
        raise CheckpointError(f"{file} cannot be used: {error}") from error
    if trainer.model_type not in (1, 2):
        raise CheckpointError(
            f"{file}: SentencePiece model type {trainer.model_type} is not supported; supported: 1"
            " (unigram), 2 (BPE)"
        )
    backend = tokenizers.Tokenizer(model)
    _set_normalizer(backend, proto.normalizer_spec, own, legacy)
    _set_decoder(backend, proto)
    control = [p.piece for p in proto.pieces if p.type == _CONTROL]
    backend.add_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    special = {name: pieces[i] for name, i in ids.items() if 0 <= i < len(pieces)}
    return Built(backend, file, special)


def _read_proto(file: Path) -> Any:
    """The model as SentencePiece's own protobuf message."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise CheckpointError(
            f"{file} is a SentencePiece model, which needs the packages sentencepiece and protobuf:"
            " pip install 'deepinfer-jax[sentencepiece]'"
        ) from error
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's DecodeError, of whichever implementation
        raise CheckpointError(f"{file} is not a SentencePiece model: {error}") from error
    return proto


def _bpe(proto: Any, ignore_merges: bool) -> models.BPE:
    """SentencePiece has scores in place of merges: two normal pieces merge in the order of their
    union's score."""
    normal = {p.piece: (-p.score, i) for i, p in enumerate(proto.pieces) if p.type == _NORMAL}
    ranked = []
    for piece, rank in normal.items():
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        ranked += [
            (*rank, left, right) for left, right in halves if left in normal and right in normal
        ]
    return models.BPE(
        vocab={p.piece: i for i, p in enumerate(proto.pieces)},
        merges=[(left, right) for _, _, left, right in sorted(ranked)],
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=ignore_merges,
    )


def _unigram(proto: Any) -> models.Unigram:
    return models.Unigram(
        [(p.piece, p.score) for p in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _set_normalizer(backend: tokenizers.Tokenizer, spec: Any, own: list[str], legacy: bool) -> None:
    """SentencePiece's normaliser, in its order. legacy: every text between added tokens gets the
    space in front, not only the first one."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", "▁"))
    splits: list[pre_tokenizers.PreTokenizer] = []
    if spec.add_dummy_prefix:
        if legacy:  # Metaspace leaves a text alone that begins with its mark
            steps.append(normalizers.Replace(Regex(r"\A▁"), "▁▁"))
        scheme = "always" if legacy else "first"
        splits.append(pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False))
    if own:  # emitted whole, never merged
        pattern = "|".join(re.escape(piece) for piece in sorted(own, key=len, reverse=True))
        splits.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    backend.normalizer = normalizers.Sequence(steps)
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)


def _set_decoder(backend: tokenizers.Tokenizer, proto: Any) -> None:
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " ")]
    if proto.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
