"""Chat templates: which ones a checkpoint has, and rendering a conversation with one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.text.chat_messages import OpenEnd, plain, template_messages
from deepinfer_jax.text.template_renderer import RENDERER, TemplateFailure
from deepinfer_jax.text.tool_schema import tool_schemas

logger = logging.getLogger(__name__)

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.jinja2")


class ChatTemplate:
    """One template. It is compiled when first used, so that a broken one does not keep a model from
    loading."""

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.name = name

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> str:
        """The conversation as text.

        messages: mappings, dataclasses or pydantic models with a role. tools: JSON schemas or
        functions. continue_final_message: leave the last message open, its "content" (True) or the
        named field. keywords: further variables, each of which the template must read. Raises
        ValueError where the template is broken, exceeds the limits of template_process.py, refuses
        the messages or does not read a keyword.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message goes on with the last message, add_generation_prompt begins"
                " a new one: give one of the two"
            )
        conversation = template_messages(messages)
        end = None
        if continue_final_message:
            end = OpenEnd(conversation, continue_final_message, self.source)
        variables = {
            **(special_tokens or {}),
            "tools": tool_schemas(tools),
            "documents": _documents(documents),
            "add_generation_prompt": add_generation_prompt,
            **{k: plain(v, k) for k, v in keywords.items()},
        }
        request = {
            "source": self.source,
            "messages": conversation,
            "variables": variables,
            "keywords": sorted(keywords),
        }
        try:
            text, unread = RENDERER.render(request)
        except TemplateFailure as error:
            raise ValueError(f"{self.name}: {error}") from error
        if lost := {"tools", "documents"} & set(unread):
            logger.warning("%s does not show the model its %s", self.name, sorted(lost))
        return text if end is None else end.cut(text)


def _documents(documents: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if documents is None:
        return None
    if isinstance(documents, str) or not all(isinstance(d, Mapping) for d in documents):
        raise ValueError(f"documents must be a list of mappings, got {documents!r}")
    return plain(list(documents), "documents")


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Template name -> source: chat_template.jinja(2) wins over tokenizer_config.json; named ones
    are added from both places. Raises CheckpointError naming a file that cannot be read."""
    templates: dict[str, str] = {}
    saved = tokenizer_config.get("chat_template")
    where = folder / "tokenizer_config.json"
    if isinstance(saved, str):
        templates["default"] = saved
    elif isinstance(saved, list):  # [{"name": "default", "template": ...}, ...]
        for entry in saved:
            templates.update([_named_template(entry, where)])
    elif saved is not None:
        raise CheckpointError(f"{where}: chat_template must be text or a list, got {saved!r}")
    for file in _TEMPLATE_FILES:
        if (folder / file).is_file():
            templates["default"] = _read_text(folder / file)
            break
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja*")):
        templates[file.stem] = _read_text(file)
    return templates


def _named_template(entry: Any, where: Path) -> tuple[str, str]:
    named = entry if isinstance(entry, Mapping) else {}
    name, source = named.get("name"), named.get("template")
    if not isinstance(name, str) or not isinstance(source, str):
        raise CheckpointError(
            f"{where}: an entry of chat_template must have a name and a template, got {entry!r}"
        )
    return name, source


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8: {error}") from error
