"""The rope parameters of a config.json in all their spellings, as one flat set of known keys.

Old: `rope_theta` and `rope_scaling` at the top. New: `rope_parameters`, flat, or one set per layer
type. A key that is not known is refused, because it may change what the model computes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})
_YARN = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
)
KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
    "yarn": _YARN | {"factor", "original_max_position_embeddings"},
    "longrope": frozenset(
        {
            "factor",
            "short_factor",
            "long_factor",
            "attention_factor",
            "original_max_position_embeddings",
        }
    ),
}
"""Rope type -> the keys that mean something to it, besides those that all types have."""

_ANY = _COMMON.union(*KEYS.values())
LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict with "rope_type"; rope_theta and partial_rotary_factor where they are given.

    Where both spellings stand side by side, `rope_scaling` wins (as in transformers 5, where people
    add it to lengthen the context). Raises ValueError naming the type or key that is not known, and
    where layer types differ in their parameters.
    """
    rope = _flat(config, "rope_parameters") | _flat(config, "rope_scaling")
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope_type is None and rope.get("factor") not in (None, 1, 1.0):
        raise ValueError(
            f"rope_scaling has a factor of {rope['factor']!r} and no rope_type; known types:"
            f" {tuple(KEYS)}"
        )
    rope_type = rope_type or "default"
    if rope_type not in KEYS:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {tuple(KEYS)}")
    if unknown := sorted(rope.keys() - _ANY):
        raise ValueError(f"rope parameters {unknown} are not known (rope type {rope_type!r})")
    if unread := sorted(rope.keys() - _COMMON - KEYS[rope_type]):
        logger.warning("rope type %r does not read its parameters %s", rope_type, unread)
        rope = {k: v for k, v in rope.items() if k not in unread}
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None and config.get(key) is not None:
            rope[key] = config[key]
    rope.pop("type", None)
    return rope | {"rope_type": rope_type}


def original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Tokens that the model was trained on before its context was lengthened; 0 where unknown.

    The key beside the rope parameters wins over the one among them, as in transformers.
    """
    key = "original_max_position_embeddings"
    value = config.get(key) or rope.get(key) or config.get("max_position_embeddings") or 0
    return integer(key, value)


def scaled_length(config: Mapping[str, Any]) -> int:
    """The longest sequence in tokens: max_position_embeddings, or what rope scaling makes of it.

    linear: times the factor. yarn: the original length times the factor. The others say the scaled
    length in max_position_embeddings itself (llama3, longrope).
    """
    limit = integer("max_position_embeddings", config["max_position_embeddings"])
    rope = dict(config.get("rope_parameters") or {}) | dict(config.get("rope_scaling") or {})
    if any(isinstance(v, Mapping) for v in rope.values()):
        try:
            rope = rope_parameters(config)
        except ValueError:  # sets of a model's own, which its class reads
            return limit
    factor = rope.get("factor")
    match rope.get("rope_type") or rope.get("type"):
        case "linear" if factor is not None:
            return max(limit, int(limit * number("factor", factor)))
        case "yarn" if factor is not None:
            return max(limit, int(original_length(config, rope) * number("factor", factor)))
    return limit


def _flat(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The set under `name`, which all layer types in use share. None as a value is no value."""
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} must be an object, got {rope!r}")
    nested = {k: v for k, v in rope.items() if isinstance(v, Mapping)}
    if not nested:
        return {k: v for k, v in rope.items() if v is not None}
    if unknown := sorted(nested.keys() - set(LAYER_TYPES)):
        raise ValueError(f"{name} {unknown} are not known; known layer types: {LAYER_TYPES}")
    used = set(config.get("layer_types") or nested)
    sets = [dict(v) for k, v in nested.items() if k in used]
    if not sets or any(s != sets[0] for s in sets):
        raise ValueError(
            f"{name} differs between layer types, which is not supported: {sorted(nested)}"
        )
    shared = {k: v for k, v in rope.items() if k not in nested}
    return {k: v for k, v in (shared | sets[0]).items() if v is not None}


def number(key: str, value: Any) -> float:
    """A finite number > 0; ValueError naming the key otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    if not 0 < value < 1e300:  # NaN is neither
        raise ValueError(f"{key} must be finite and positive, got {value!r}")
    return float(value)


def integer(key: str, value: Any) -> int:
    """A whole number >= 0 below 2**31; ValueError naming the key otherwise."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or not 0 <= value < 2**31:
        raise ValueError(f"{key} must be a whole number in [0, 2**31), got {value!r}")
    return int(value)


def numbers(key: str, value: Any, count: int) -> tuple[float, ...]:
    """`count` finite numbers > 0; ValueError naming the key otherwise."""
    if not isinstance(value, list | tuple) or len(value) != count:
        size = len(value) if isinstance(value, list | tuple) else repr(value)
        raise ValueError(f"{key} must have {count} numbers, one per rotated pair, got {size}")
    return tuple(number(key, v) for v in value)
