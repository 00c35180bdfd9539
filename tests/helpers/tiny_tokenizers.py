"""Small tokenizers of each decoder kind, built in memory."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

SPECIALS = ["<|im_start|>", "<|im_end|>"]


def byte_level(extra_pieces: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """GPT-2 style: ids 0..255 are the single bytes (in the alphabet's order), then extra pieces,
    then two special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [_byte_spelling(p) for p in extra_pieces]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return backend


def byte_id(backend: tokenizers.Tokenizer, byte: int) -> int:
    """Id of a single byte in a byte_level() tokenizer."""
    return backend.token_to_id(_byte_spelling(bytes([byte])))


def sentencepiece(
    words: tuple[str, ...] = ("▁the", "▁sea", "s", "é", "海"),
) -> tokenizers.Tokenizer:
    """Llama-2 style: special tokens, 256 byte tokens, pieces with ▁ for a space; the decoder strips
    one leading space."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["▁", *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "▁the", "▁sea", "s", "▁"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "the", "sea", "##s", "##side", "."]
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def _byte_spelling(text: str | bytes) -> str:
    """How a byte-level vocabulary spells a text."""
    raw = text.encode("utf-8") if isinstance(text, str) else text
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return "".join(chr(b) if b in printable else chr(256 + others.index(b)) for b in raw)
