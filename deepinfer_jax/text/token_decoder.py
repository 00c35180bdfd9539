"""Token ids to text, one token at a time: a decoder per kind of "decoder" entry in tokenizer.json.

Each decoder has `feed(token_id) -> text`, `finish() -> text` and a serialisable state. Work per
token is constant: what is held back is at most one incomplete UTF-8 character (or, for the decoders
of other kinds, a window of a few tokens).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deepinfer_jax.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """What IncrementalDetokenizer needs of a decoder."""

    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def make_token_decoder(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
) -> TokenDecoder:
    """The decoder for a tokenizer; prompt_ids only tell whether text goes before (it keeps a
    leading space) and never show."""
    steps = _decoder_steps(tokenizer.decoder_spec)
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return ByteLevelDecoder(tokenizer, skip_special_tokens)
    rules = _piece_rules(steps)
    if rules is None:
        return WindowDecoder(tokenizer, prompt_ids, skip_special_tokens)
    at_start = not _has_text(tokenizer, prompt_ids, skip_special_tokens)
    return PieceDecoder(tokenizer, rules, skip_special_tokens, at_start)


class ByteLevelDecoder:
    """GPT-2 style byte-level BPE: every token is a run of bytes; text is their UTF-8, malformed
    parts as U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(byte_level_bytes(self._tokenizer.id_to_token(token_id) or ""))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def state_dict(self) -> dict[str, Any]:
        return {"pending": self._utf8.getstate()[0].hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._utf8.setstate((bytes.fromhex(state["pending"]), 0))


@dataclass(frozen=True)
class PieceRules:
    """SentencePiece-style decoding, from tokenizer.json."""

    replace: tuple[tuple[str, str], ...] = ()  # in every piece: ("▁", " ")
    byte_fallback: bool = False  # pieces "<0x0A>" are bytes
    strip_char: str = ""  # taken from the start of the text, where nothing goes before:
    strip_count: int = 0  # at most so many
    strip_first_piece: str = ""  # Metaspace: character dropped from the whole first piece


class PieceDecoder:
    """SentencePiece-style pieces with byte fallback.

    Differs from a decode of the whole in one case: in a run of byte tokens that is not valid UTF-8
    as a whole, the characters that are complete are kept (a whole decode turns the entire run into
    U+FFFD, also what was shown before).
    """

    def __init__(
        self, tokenizer: Tokenizer, rules: PieceRules, skip_special_tokens: bool, at_start: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pending = b""
        self._first_piece = at_start
        self._to_strip = rules.strip_count if at_start else 0

    def feed(self, token_id: int) -> str:
        piece = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return ""
        if self._first_piece and self._rules.strip_first_piece:
            piece = piece.replace(self._rules.strip_first_piece, "")
        self._first_piece = False
        for old, new in self._rules.replace:
            piece = piece.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(piece) if self._rules.byte_fallback else None
        return self._strip(self._feed_byte(int(byte[1], 16)) if byte else self.finish() + piece)

    def finish(self) -> str:
        malformed, self._pending = _REPLACEMENT * len(self._pending), b""
        return malformed

    def state_dict(self) -> dict[str, Any]:
        return {
            "pending": self._pending.hex(),
            "first_piece": self._first_piece,
            "to_strip": self._to_strip,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = bytes.fromhex(state["pending"])
        self._first_piece, self._to_strip = state["first_piece"], state["to_strip"]

    def _feed_byte(self, byte: int) -> str:
        self._pending += bytes([byte])
        text = ""
        while self._pending:
            try:
                text += self._pending.decode("utf-8")
                self._pending = b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += _REPLACEMENT * (error.end - error.start)
                self._pending = self._pending[error.end :]
        return text

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._rules.strip_char):
                self._to_strip = 0
                break
            text = text[len(self._rules.strip_char) :]
            self._to_strip -= 1
        return text


class WindowDecoder:
    """Any other kind: decodes a short window of tokens with and without the new ones, and takes the
    difference."""

    _CONTEXT = 8  # tokens before the new ones; decoders look back one token at most
    # a UTF-8 character has at most four bytes, so four tokens that give no character never will
    _MAX_PENDING = 4

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = [int(i) for i in prompt_ids[-self._CONTEXT :]]
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < self._MAX_PENDING:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._new_text()) if self._pending else ""

    def state_dict(self) -> dict[str, Any]:
        return {"context": list(self._context), "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._context, self._pending = list(state["context"]), list(state["pending"])

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._pending, self._skip)[len(before) :]

    def _take(self, text: str) -> str:
        self._context = (self._context + self._pending)[-self._CONTEXT :]
        self._pending = []
        return text


def token_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """A token's own text, leading space kept, malformed UTF-8 as U+FFFD; None for an id past the
    vocabulary."""
    texts = tokenizer.token_texts
    if token_id not in texts:
        texts[token_id] = _token_text(tokenizer, token_id)
    return texts[token_id]


def _token_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    piece = tokenizer.id_to_token(token_id)
    if piece is None:
        return None
    steps = _decoder_steps(tokenizer.decoder_spec)
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return byte_level_bytes(piece).decode("utf-8", "replace")
    rules = _piece_rules(steps)
    if rules is None:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    decoder = PieceDecoder(tokenizer, rules, skip_special_tokens=False, at_start=False)
    return decoder.feed(token_id) + decoder.finish()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; a piece with a character outside the byte alphabet (an added
    token) stands for itself."""
    try:
        return bytes([_CHAR_TO_BYTE[c] for c in piece])
    except KeyError:
        return piece.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, reversed: printable Latin-1 stands for itself, the other bytes for
    U+0100 and on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_CHAR_TO_BYTE = _byte_alphabet()


def _decoder_steps(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def _piece_rules(steps: Sequence[Mapping[str, Any]]) -> PieceRules | None:
    """Rules for [Replace..., ByteFallback?, Fuse?, Strip?] or [Metaspace]; None for any other
    sequence."""
    kinds = [s["type"] for s in steps]
    if kinds == ["Metaspace"]:
        char = steps[0]["replacement"]
        scheme = steps[0].get(
            "prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never"
        )
        return PieceRules(
            replace=((char, " "),), strip_first_piece="" if scheme == "never" else char
        )
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    ranks = [order.index(k) if k in order else -1 for k in kinds]
    if (
        not kinds
        or -1 in ranks
        or ranks != sorted(ranks)
        or ("Strip" in kinds) != (kinds[-2:] == ["Fuse", "Strip"])
    ):
        return None
    replace = [s for s in steps if s["type"] == "Replace"]
    strip = steps[-1] if kinds[-1] == "Strip" else None
    if any("String" not in s["pattern"] for s in replace) or (strip and strip["stop"]):
        return None
    return PieceRules(
        replace=tuple((s["pattern"]["String"], s["content"]) for s in replace),
        byte_fallback="ByteFallback" in kinds,
        strip_char=strip["content"] if strip else "",
        strip_count=strip["start"] if strip else 0,
    )


def _has_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> bool:
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    return any(
        int(i) not in skipped and tokenizer.id_to_token(int(i)) for i in reversed(prompt_ids)
    )
