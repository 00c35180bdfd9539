"""Chat templates: Jinja in a sandbox, with the functions and filters that Hugging Face templates
count on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.jinja2")


class ChatTemplate:
    """One template. It is compiled when first used, so that a broken one does not keep a model from
    loading."""

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.name = name
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as text. Raises ValueError where the template is broken or refuses the
        messages."""
        _check_messages(messages)
        variables = {"documents": None, "tools": None, **variables}
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(messages=list(messages), **variables)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.name}: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self.name}: {error}") from error


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Template name -> source: chat_template.jinja(2) wins over tokenizer_config.json; named ones
    are added from both places."""
    templates: dict[str, str] = {}
    saved = tokenizer_config.get("chat_template")
    if isinstance(saved, str):
        templates["default"] = saved
    elif isinstance(
        saved, list
    ):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        templates.update({entry["name"]: entry["template"] for entry in saved})
    for file in _TEMPLATE_FILES:
        if (folder / file).is_file():
            templates["default"] = (folder / file).read_text(encoding="utf-8")
            break
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja*")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training masks; here it is
    just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which would corrupt tool descriptions."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"messages[{i}] must be a mapping with a 'role', got {message!r}")
