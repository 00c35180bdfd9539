"""JSON that is JSON: what is written can be read by any parser, what is read is checked first.

Imports: nothing of ours.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
"""Arrays and objects inside each other. Everything that walks a value afterwards (templates,
encoders) recurses too, so what is nested deeper than any real request is refused here."""


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON text of `value`, not escaped beyond what JSON asks for. Numbers that are not finite
    become null: JSON has no NaN and no Infinity."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, in one line, for what is no JSON (NaN and
    Infinity included) and for what would be trouble later: a key given twice, a number outside the
    range of a float, text with half a surrogate pair, nesting deeper than MAX_DEPTH."""
    try:
        value = json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite_number,
            parse_int=_whole_number,
            object_pairs_hook=_unique_keys,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    check_strings_and_depth(value)
    return value


def check_strings_and_depth(value: Any) -> None:
    """ValueError for a text that UTF-8 cannot hold, or nesting deeper than MAX_DEPTH."""
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            check_text(item)
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
            if isinstance(item, dict):
                left += ((key, depth) for key in item)
                item = list(item.values())
            left += ((inner, depth + 1) for inner in item)


def check_text(text: str) -> None:
    """ValueError if UTF-8 cannot hold the text: half of a surrogate pair, as cutting a text inside
    an emoji leaves behind."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has half a surrogate pair, \\u{ord(text[error.start]):04x}, at character"
            f" {error.start}"
        ) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"not JSON: {name} is no JSON number")


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is outside the range of a float")
    return value


def _whole_number(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"the number {text[:40]}... has {len(text)} digits")
    return int(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} is given twice")
    return value
