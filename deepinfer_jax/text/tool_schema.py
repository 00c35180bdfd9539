"""Python functions as tools: the JSON schema that chat templates show to a model.

The same schema as transformers makes of a function with type hints and a Google style docstring.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_jax.text.chat_messages import plain

_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    types.NoneType: "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_SCALARS = (int, float, str, bool, types.NoneType)
_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$|^[ \t]*(Returns|Raises):", re.M)
_ARGUMENT = re.compile(r"^([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schemas(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools as templates read them: mappings as they are, functions as their schema. None stays
    None.

    Raises ValueError naming the tool.
    """
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list of mappings or functions, got {tools!r}")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return function_schema(tool)
    value = plain(tool, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON schema or a function, got {tool!r}")
    return value


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {name, description, parameters[, return]}}.

    Every parameter needs a type hint and a description under "Args:"; a description may end with
    `(choices: ["a", "b"])`. Raises ValueError naming the function and the parameter.
    """
    name = getattr(function, "__name__", "operation")
    doc = inspect.getdoc(function)
    if not doc:
        raise ValueError(f"the tool {name} has no docstring to describe it")
    description, arguments, returned = _read_docstring(doc.strip())
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # whatever evaluating the annotations may raise
        raise ValueError(f"the tool {name} has type hints that cannot be read: {error}") from error
    properties, required = {}, []
    for parameter in _parameters(function):
        if parameter.name not in hints:
            raise ValueError(f"the tool {name} has no type hint for {parameter.name!r}")
        if parameter.name not in arguments:
            raise ValueError(f"the tool {name} does not describe {parameter.name!r} under Args:")
        where = f"the tool {name}, parameter {parameter.name!r}"
        schema = _type_schema(hints[parameter.name], where)
        properties[parameter.name] = schema | _description(arguments[parameter.name], where)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    body = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints and (schema := _return_schema(hints["return"], returned)) is not None:
        body["return"] = schema
    return {"type": "function", "function": body}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Without an implicit, unannotated self or cls."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        first = parameters[0]
        return parameters[1:] if first.annotation is inspect.Parameter.empty else parameters
    return parameters


def _return_schema(hint: Any, description: str | None) -> dict[str, Any] | None:
    """None where the hint has no schema: the model never writes a return value."""
    try:
        schema = _type_schema(hint, "return")
    except ValueError:
        return None
    return schema if description is None else schema | {"description": description}


def _description(text: str, where: str) -> dict[str, Any]:
    choices = _CHOICES.search(text)
    if not choices:
        return {"description": text}
    try:
        values = json.loads(choices.group(1))
    except ValueError as error:
        raise ValueError(f"{where}: choices are not valid JSON: {error}") from error
    values = [v.strip() if isinstance(v, str) else v for v in values]
    return {"enum": values, "description": text[: choices.start()].strip()}


def _read_docstring(doc: str) -> tuple[str, dict[str, str], str | None]:
    """(description, description of each argument, of what is returned)."""
    sections, start, current = {"": ""}, 0, ""
    for match in _SECTION.finditer(doc):
        sections[current] = doc[start : match.start()]
        current, start = match.group(1) or match.group(2), match.end()
    sections[current] = doc[start:]
    returned = sections.get("Returns")
    arguments = _read_arguments(sections.get("Args", ""))
    return sections[""].strip(), arguments, None if returned is None else returned.strip()


def _read_arguments(text: str) -> dict[str, str]:
    """`name (type): description` lines; deeper ones continue a description."""
    arguments: dict[str, str] = {}
    indent, name = None, None
    for line in text.split("\n"):
        if not line.strip():
            continue
        match = _ARGUMENT.match(line)
        if match and (indent is None or len(match.group(1)) <= len(indent)):
            indent, name = match.group(1), match.group(2)
            arguments[name] = match.group(3).strip()
        elif name is not None:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return arguments


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_schema([member.value for member in hint], where)
    if origin is None:
        if hint not in _TYPES:
            raise ValueError(f"{where}: the type {hint!r} has no JSON schema")
        return {"type": _TYPES[hint]}
    if origin is typing.Union or origin is types.UnionType:
        return _union_schema(arguments, where)
    if origin is typing.Literal:
        return _enum_schema(list(arguments), where)
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], where)}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(a, where) for a in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], where)}
    raise ValueError(f"{where}: the type {hint!r} has no JSON schema")


def _union_schema(arguments: tuple[Any, ...], where: str) -> dict[str, Any]:
    """Plain types as a list of types, others as anyOf; None makes it nullable."""
    schemas = [_type_schema(a, where) for a in arguments if a is not types.NoneType]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(s.keys() == {"type"} and isinstance(s["type"], str) for s in schemas):
        names = sorted({s["type"] for s in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if types.NoneType in arguments else {})


def _enum_schema(values: list[Any], where: str) -> dict[str, Any]:
    if not values or any(type(v) not in _SCALARS for v in values):
        raise ValueError(f"{where}: choices must be JSON scalars, got {values!r}")
    names = list(dict.fromkeys(_TYPES[type(v)] for v in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}
