"""Environment variables of the engine, prefix `DEEPINFER_`.

Each is read once, when first asked for, and cached: `environ.get("PREFILL_ATTEMPT_INTERVAL")`. A
change of `os.environ` shows only after `rearm(name)`. Roles provide defaults with set-if-unset
semantics, so an operator's explicit value wins.

Imports: scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_jax.scheduler.roles import RolePolicy

PREFIX = "DEEPINFER_"
_FALSE = ("", "0", "false", "False")


@dataclass(frozen=True)
class Variable:
    """default: the value when unset. parse: text -> value, ValueError for malformed text."""

    default: object
    parse: Callable[[str], object]
    meaning: str


def parse_bool(text: str) -> bool:
    """False for empty, "0", "false", "False"; True for anything else."""
    return text not in _FALSE


def parse_token_ranges(text: str) -> tuple[int, ...]:
    """Token ids, in order: "0..3,7" -> (0, 1, 2, 3, 7)."""
    ids: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("..")
        ids.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ids))


VARIABLES: dict[str, Variable] = {
    # role defaults are written into these two
    "ZERO_OVERHEAD_SCHEDULING": Variable(
        True, parse_bool, "schedule step N+1 before step N's tokens are read"
    ),
    "USE_MULTIMODAL_POOL": Variable(True, parse_bool, "keep image features in a pool"),
    # scheduling
    "PREFILL_ATTEMPT_INTERVAL": Variable(
        70, int, "decode steps between prefill votes that need all ranks"
    ),
    "PREFILL_ANY_ATTEMPT_INTERVAL": Variable(
        100, int, "decode steps between prefill votes that need any rank"
    ),
    "PREFILL_MAX_SUM_SEQLEN_K": Variable(
        2**30, int, "limit of the summed key lengths of a prefill step"
    ),
    "NUM_STATE_SLOTS_RATIO": Variable(1.2, float, "state rows per running slot"),
    # drafts
    "USE_NEXTN_DECODE": Variable(5, int, "drafts per decode step, for models with a draft head"),
    "ENABLE_MTP_VARLEN": Variable(
        False, parse_bool, "choose the number of drafts by their confidence"
    ),
    # experts
    "OVERRIDE_NUM_EXTRA_EXPERTS": Variable(0, int, "redundant experts"),
    "EXPERT_COUNT_WINDOW_SIZE": Variable(100, int, "steps of expert load kept"),
    "EXPERT_REARRANGEMENT_STEP_INTERVAL": Variable(
        0, int, "steps between rearrangements, 0: never, -1: as the role says"
    ),
    "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE": Variable(
        False,
        parse_bool,
        "NORMAL: prefill steps count too, and experts move at the next decode step",
    ),
    "MOE_LB_STAT_INTERVAL": Variable(
        128, int, "counted steps between two looks at the balance of experts, 0: none"
    ),
    "FORCE_IMBALANCE_RATIO": Variable(
        0.0,
        float,
        "tests: tokens take experts by turns, so that the first rank gets this many"
        " times the mean; 0: the router decides",
    ),
    "FORCE_LOAD_BALANCE": Variable(
        False, parse_bool, "tests: tokens take experts by turns instead of as the router says"
    ),
    "SHOW_EPLB_DETAIL": Variable(
        False, parse_bool, "log the balance of every layer at a rearrangement"
    ),
    # sampling
    "SAMPLER_FORCE_TOPK": Variable(0, int, "restrict sampling to this many logits, 0: off"),
    "DECODE_TOKEN_BLACKLIST": Variable(
        (), parse_token_ranges, 'token ids never sampled, such as "0..3,7"'
    ),
    "BATCH_INVARIANT": Variable(False, parse_bool, "results do not depend on the batch"),
    # engine
    "ENFORCE_EAGER": Variable(False, parse_bool, "compile nothing ahead"),
    "JIT_CACHE_DIR": Variable("", str, "persistent compilation cache"),
    "LOGGING_INTERVAL_STEP": Variable(100, int, "steps between log lines, <= 0: off"),
    "GC_INTERVAL_STEP": Variable(
        1000, int, "without effect: collections were measured not to hold up steps"
    ),
    "MULTIMODAL_POOL_SIZE_GB": Variable(8.0, float, "size of the image feature pool"),
    "XGRAMMAR_TIMEOUT": Variable(20.0, float, "seconds a grammar may compile"),
}

_snapshot: dict[str, object] = {}
_defaults_set: dict[str, str] = {}


def get(name: str):
    """Value of `DEEPINFER_<name>`. Raises KeyError for an unknown variable, ValueError naming a
    malformed one."""
    if name not in _snapshot:
        _snapshot[name] = _read(name)
    return _snapshot[name]


def get_bool(name: str) -> bool:
    """get() of a switch."""
    return bool(get(name))


def get_int(name: str) -> int:
    """get() of a number."""
    return int(get(name))


def _read(name: str):
    variable = VARIABLES[name]
    text = os.environ.get(PREFIX + name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name}={text!r}: {error}") from error


def is_set(name: str) -> bool:
    """The operator, or a role default, has given a value."""
    return PREFIX + name in os.environ


def rearm(*names: str) -> None:
    """Forgets the cached values of these variables: the next get() reads them again."""
    for name in names:
        if name not in VARIABLES:
            raise KeyError(f"unknown environment variable {PREFIX}{name}")
        _snapshot.pop(name, None)


def set_default(name: str, value: str | bool | int | float) -> None:
    """Sets `DEEPINFER_<name>` unless it is set, and re-reads just that one. Booleans are written as
    "1" and "0"."""
    os.environ.setdefault(PREFIX + name, str(int(value)) if isinstance(value, bool) else str(value))
    rearm(name)


def apply_role_defaults(policy: RolePolicy) -> None:
    """What an engine of this role defaults to, as far as the operator has not decided."""
    set_default("ZERO_OVERHEAD_SCHEDULING", policy.default_zero_overhead_scheduling)
    set_default("USE_MULTIMODAL_POOL", policy.default_multimodal_pool)
