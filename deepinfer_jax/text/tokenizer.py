"""Text to token ids and back, from the files of a Hugging Face folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer_jax.json_text import check_text
from deepinfer_jax.model_files import CheckpointError, read_json_if_there
from deepinfer_jax.text.chat_template import ChatTemplate, load_chat_templates
from deepinfer_jax.text.tokenizer_files import read_tokenizer


class Tokenizer:
    """A `tokenizers.Tokenizer` with what text generation needs beside it: BOS, EOS ids, special
    tokens, chat template.

    Attributes: name: where it was loaded from; used in messages. eos_token_ids: ids that end a
      generation: generation_config.json's, else config.json's, else the tokenizer's own.
      special_tokens: name ("bos_token", ...) -> text, as chat templates see them. token_texts:
      texts of single tokens met so far (deepinfer_jax.text.token_decoder.token_text fills it).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "tokenizer",
    ) -> None:
        self.backend = backend
        self.name = name
        # Padding or truncation saved in tokenizer.json is about training batches; it would alter
        # prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.special_ids = frozenset(
            i for i, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")
        own_eos = self._special_id("eos_token")
        self.eos_token_ids = tuple(eos_token_ids) or (() if own_eos is None else (own_eos,))
        self.token_texts: dict[int, str | None] = {}
        self.chat_templates = {
            k: ChatTemplate(v, f"{name}: chat template {k!r}")
            for k, v in (chat_templates or {}).items()
        }

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """The first of eos_token_ids."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    @functools.cached_property
    def decoder_spec(self) -> Mapping[str, Any] | None:
        """The "decoder" entry of tokenizer.json: how pieces become text."""
        return json.loads(self.backend.to_str()).get("decoder")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; add_special_tokens adds BOS where the tokenizer's files say so.
        ValueError for a text with half a surrogate pair, which UTF-8 cannot hold."""
        check_text(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of many texts, in parallel threads."""
        for text in texts:
            check_text(text)
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 becomes U+FFFD, ids past the vocabulary
        give nothing."""
        return self.backend.decode(
            [int(i) for i in token_ids], skip_special_tokens=skip_special_tokens
        )

    def id_to_token(self, token_id: int) -> str | None:
        """The piece as the vocabulary spells it; None for an id past the vocabulary."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """Renders a conversation with the checkpoint's chat template.

        messages: [{"role": ..., "content": ...}, ...]. chat_template: the name of one of the
        checkpoint's templates or a template's own text. tools, kwargs: see `ChatTemplate.render`;
        chat_template_kwargs: the same as kwargs, and wins over them. Returns token ids, or the
        rendered text with tokenize=False. Raises ValueError without a template or where the
        template refuses the messages or does not read a keyword.
        """
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **kwargs}
        options |= _template_kwargs(chat_template_kwargs)
        template = self._chat_template(chat_template, options["tools"] is not None)
        special = {k: options.pop(k, v) for k, v in self.special_tokens.items()}
        text = template.render(messages, special_tokens=special, **options)
        # The template writes BOS itself where the model wants one.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _chat_template(self, chosen: str | None, has_tools: bool) -> ChatTemplate:
        if chosen is not None and chosen not in self.chat_templates:
            return ChatTemplate(chosen, "the chat_template given")
        if chosen is None:
            chosen = "tool_use" if has_tools and "tool_use" in self.chat_templates else "default"
        if chosen not in self.chat_templates:
            have = (
                f"; it has templates {sorted(self.chat_templates)}" if self.chat_templates else ""
            )
            raise ValueError(
                f"{self.name} has no {chosen!r} chat template{have}; give prompts as plain text or"
                " pass chat_template"
            )
        return self.chat_templates[chosen]

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _template_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs must be a mapping, got {given!r}")
    if own := sorted(given.keys() & {"messages", "tokenize", "chat_template", "special_tokens"}):
        raise ValueError(f"chat_template_kwargs must not hold {own}")
    return dict(given)


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder (or of the folder of a tokenizer.json); None where there is
    none.

    Raises CheckpointError, a ValueError, that names the file which cannot be read.
    """
    folder = Path(path)
    if folder.name == "tokenizer.json":
        folder = folder.parent
    files = read_tokenizer(folder)
    if files is None:
        return None
    return Tokenizer(
        files.backend,
        special_tokens=files.special,
        chat_templates=load_chat_templates(folder, files.config),
        eos_token_ids=load_eos_token_ids(folder),
        name=str(folder),
    )


def load_model_tokenizer(
    model: Path, tokenizer_folder: Path
) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """(tokenizer or None, EOS ids): the model folder's EOS ids, else the tokenizer's own."""
    tokenizer = load_tokenizer(tokenizer_folder)
    own = () if tokenizer is None else tokenizer.eos_token_ids
    return tokenizer, load_eos_token_ids(model) or tuple(own)


def load_eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """EOS ids of a model folder: generation_config.json's (a number or a list), else config.json's;
    () where neither has any."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        config = read_json_if_there(file)
        nested = config.get("text_config")
        inner = nested if isinstance(nested, Mapping) else {}
        value = config.get("eos_token_id", inner.get("eos_token_id"))
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise CheckpointError(
                f"{file}: eos_token_id must be a token id or a list of them, got {value!r}"
            )
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()
