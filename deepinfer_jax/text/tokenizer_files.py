"""A tokenizer out of a model folder's files, by the rules of transformers 5.

tokenizer.json is the tokenizer. Tokens added to it, and marks that make one special, may stand in
tokenizer_config.json (`added_tokens_decoder`, `extra_special_tokens`, `bos_token`, ...) or, where
that has no `added_tokens_decoder`, in special_tokens_map.json and added_tokens.json. Whether BOS is
put in front is said by tokenizer.json's post-processor; add_bos_token and add_eos_token count only
where there is no tokenizer.json (transformers 5: tokenization_utils_base._from_pretrained).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from deepinfer_jax.model_files import CheckpointError, read_json_if_there
from deepinfer_jax.text.tokenizer_sources import build_backend

logger = logging.getLogger(__name__)

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class TokenizerFiles:
    """backend: with all added tokens. special: name -> text, the names of SPECIAL_NAMES and a
    model's own ("image_token"). config: tokenizer_config.json."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    config: dict[str, Any]


def read_tokenizer(folder: Path) -> TokenizerFiles | None:
    """None where the folder has no tokenizer. Raises CheckpointError naming the file and key."""
    config = read_json_if_there(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if file.is_file():
        backend = _guarded(file, lambda: tokenizers.Tokenizer.from_file(str(file)))
        declared = _Declared.read(folder, config, {})
        _add(backend, declared, file)
        return TokenizerFiles(backend, declared.named_texts(), config)
    built = build_backend(folder, config)
    if built is None:
        return None
    declared = _Declared.read(folder, config, built.special)
    _add(built.backend, declared, built.file)
    _put_ends(built.backend, declared.named_texts(), config, folder / "tokenizer_config.json")
    return TokenizerFiles(built.backend, declared.named_texts(), config)


@dataclass(frozen=True)
class _Declared:
    """Tokens the files declare beside tokenizer.json: by id, by name, and without a name."""

    by_id: dict[int, AddedToken]
    named: dict[str, AddedToken | str]
    unnamed: list[AddedToken | str]

    @classmethod
    def read(
        cls, folder: Path, config: Mapping[str, Any], defaults: Mapping[str, str]
    ) -> _Declared:
        file = folder / "tokenizer_config.json"
        values = {**defaults, **config}
        by_id = _added_by_id(file, config.get("added_tokens_decoder"))
        if config.get("added_tokens_decoder") is None:
            marks = folder / "special_tokens_map.json"
            extra = read_json_if_there(marks)
            values |= {k: v for k, v in extra.items() if v is not None}
            file = marks if extra else file
        named = _named(file, values)
        unnamed = _unnamed(file, values, named)
        if config.get("added_tokens_decoder") is None:
            special = {str(t) for t in [*named.values(), *unnamed]}
            by_id = _legacy_added(folder / "added_tokens.json", special)
        return cls(by_id, named, unnamed)

    def named_texts(self) -> dict[str, str]:
        return {name: str(token) for name, token in self.named.items()}


def _added_by_id(file: Path, entries: Any) -> dict[int, AddedToken]:
    """added_tokens_decoder: {"32000": {"content": ..., "special": ...}}."""
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"{file}: added_tokens_decoder must be an object, got {entries!r}")
    tokens = {}
    for key, entry in entries.items():
        where = f"{file}: added_tokens_decoder[{key!r}]"
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise CheckpointError(f"{where}: the key must be a token id")
        tokens[int(key)] = _token(where, entry)
    return dict(sorted(tokens.items()))


def _legacy_added(file: Path, special: set[str]) -> dict[int, AddedToken]:
    """added_tokens.json: {"<tool>": 32000}."""
    tokens = {}
    for text, index in read_json_if_there(file).items():
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**31:
            raise CheckpointError(f"{file}: {text!r} must have a token id, got {index!r}")
        mark = text in special
        tokens[index] = AddedToken(text, special=mark, normalized=not mark)
    return dict(sorted(tokens.items()))


def _named(file: Path, values: Mapping[str, Any]) -> dict[str, AddedToken | str]:
    """bos_token and its like, and a model's own names: keys that end in _token, and those of an
    extra_special_tokens that is an object."""
    own = values.get("extra_special_tokens")
    found: dict[str, AddedToken | str] = {}
    for name, value in {**values, **(own if isinstance(own, Mapping) else {})}.items():
        given = name in SPECIAL_NAMES or (isinstance(own, Mapping) and name in own)
        if value is None or not (given or name.endswith("_token")):
            continue
        if isinstance(value, str):
            found[name] = value
        elif given or (isinstance(value, Mapping) and "content" in value):
            entry = {**value, "special": True} if isinstance(value, Mapping) else value
            found[name] = _token(f"{file}: {name}", entry)
    return found


def _unnamed(
    file: Path, values: Mapping[str, Any], named: Mapping[str, AddedToken | str]
) -> list[AddedToken | str]:
    """extra_special_tokens as a list, or its older name additional_special_tokens."""
    tokens: list[AddedToken | str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = values.get(key)
        if value is None or (key == "extra_special_tokens" and isinstance(value, Mapping)):
            continue
        if not isinstance(value, list):
            raise CheckpointError(f"{file}: {key} must be a list, got {value!r}")
        for i, entry in enumerate(value):
            where = f"{file}: {key}[{i}]"
            marked = {**entry, "special": True} if isinstance(entry, Mapping) else entry
            tokens.append(marked if isinstance(marked, str) else _token(where, marked))
    return tokens


def _token(where: str, entry: Any) -> AddedToken:
    """An AddedToken as JSON files hold it."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise CheckpointError(f"{where} must be an object with a content, got {entry!r}")
    special = bool(entry.get("special", False))
    flags = {name: bool(entry[name]) for name in _FLAGS if entry.get(name) is not None}
    return AddedToken(entry["content"], special=special, **({"normalized": not special} | flags))


def _add(backend: tokenizers.Tokenizer, declared: _Declared, file: Path) -> None:
    """Adds what the backend does not have as it is declared: by id first, then names, then extras.
    What has a name is special, whatever its own mark says."""
    have = {t.content: t for t in backend.get_added_tokens_decoder().values()}
    for index, token in declared.by_id.items():
        if token.content not in have or repr(have[token.content]) != repr(token):
            have[token.content] = token
            _guarded(file, lambda token=token: backend.add_tokens([token]))
        if backend.token_to_id(token.content) != index:
            found = backend.token_to_id(token.content)
            logger.warning("%s: %r is said to be %d, it is %d", file, token.content, index, found)
    extras = [t for t in declared.unnamed if str(t) not in have]
    for value in [*declared.named.values(), *extras]:
        token = have.get(str(value), value)
        if str(value) in have and token.special:
            continue
        marked = AddedToken(token, special=True) if isinstance(token, str) else _special(token)
        have[marked.content] = marked
        _guarded(file, lambda marked=marked: backend.add_tokens([marked]))


def _special(token: AddedToken) -> AddedToken:
    flags = {name: getattr(token, name) for name in _FLAGS}
    return AddedToken(token.content, special=True, **flags)


def _put_ends(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], config: Mapping[str, Any], file: Path
) -> None:
    """BOS and EOS around texts where the configuration says so."""
    pieces, tokens = ["$A"], []
    for key, name, at in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", 2)):
        wanted = config.get(key)
        if wanted is not None and not isinstance(wanted, bool):
            raise CheckpointError(f"{file}: {key} must be true or false, got {wanted!r}")
        if wanted and name in special:
            index = backend.token_to_id(special[name])
            tokens.append((special[name], index))
            pieces.insert(at, special[name])
    if tokens:
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=tokens)


def _guarded[T](file: Path, read: Callable[[], T]) -> T:
    """`read()`; whatever the Rust side raises, panics included, becomes a CheckpointError."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"cannot read tokenizer {file}: {error}") from error
