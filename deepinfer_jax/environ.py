"""Environment variables of the project, prefix `DEEPINFER_`: every one is in this table.

They are read when an engine is built, and never written: what a role defaults to is decided where
the engine's configuration is (`EngineConfig.resolve`), and an operator's explicit value wins.

Imports: nothing of ours.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PREFIX = "DEEPINFER_"
_FALSE = ("", "0", "false", "False")


@dataclass(frozen=True)
class Variable:
    """default: the value when unset; None where it depends on something else. parse: text -> value,
    ValueError for malformed text.

    missing: the feature that would read it and is not there yet; then every value but the default
    is refused. reader: the module of a package below this one that reads it by itself.
    """

    default: object
    parse: Callable[[str], object]
    meaning: str
    missing: str | None = None
    reader: str | None = None


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


def _ratio(text: str) -> float:
    value = float(text)
    if not 1 <= value < float("inf"):
        raise ValueError("must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


VARIABLES: dict[str, Variable] = {
    # scheduling
    "ZERO_OVERHEAD_SCHEDULING": Variable(
        None, parse_bool, "schedule step N+1 before step N's tokens are read; unset: by role"
    ),
    "PREFILL_ATTEMPT_INTERVAL": Variable(
        70, int, "decode steps between prefill votes that need all ranks"
    ),
    "PREFILL_ANY_ATTEMPT_INTERVAL": Variable(
        100, int, "decode steps between prefill votes that need any rank"
    ),
    "PREFILL_MAX_SUM_SEQLEN_K": Variable(
        2**30, int, "limit of the summed key lengths of a prefill step"
    ),
    "NUM_STATE_SLOTS_RATIO": Variable(1.2, _ratio, "rows of per-sequence caches per running slot"),
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
        False,
        parse_bool,
        "tests: tokens take experts by turns instead of as the router says",
    ),
    "SHOW_EPLB_DETAIL": Variable(
        False, parse_bool, "log the balance of every layer at a rearrangement"
    ),
    # sampling
    "SAMPLER_FORCE_TOPK": Variable(
        0, _count, "every request draws from this many tokens at most, 0: off"
    ),
    "DECODE_TOKEN_BLACKLIST": Variable(
        (), parse_token_ranges, 'token ids never sampled, such as "0..3,7"'
    ),
    # engine
    "ENFORCE_EAGER": Variable(False, parse_bool, "compile nothing ahead, whatever warm_up says"),
    "LOGGING_INTERVAL_STEP": Variable(100, int, "steps between log lines, <= 0: off"),
    "LOG_LEVEL": Variable("WARNING", str.upper, "of the launch commands' log"),
    # folders
    "CACHE_DIR": Variable(
        "",
        str,
        "where caches go; empty: deepinfer-jax in the XDG cache folder",
        reader="kernels_pallas.private_files",
    ),
    "JIT_CACHE_DIR": Variable("", str, "persistent compilation cache; empty: in the cache folder"),
    # kernels
    "KERNELS": Variable("", str, "which kernels to use", reader="kernels_pallas.dispatch"),
    "CPU_NATIVE": Variable(
        "auto", str, "C++ kernels on CPUs: auto, native, xla", reader="kernels_pallas.cpu.native"
    ),
    # jobs of several processes
    "COORDINATOR": Variable("", str, "address of process 0", reader="launch.processes"),
    "COORDINATOR_PORT": Variable("", str, "port of process 0", reader="launch.processes"),
    "NUM_PROCESSES": Variable("", str, "processes of the job", reader="launch.processes"),
    # features that are not there yet
    "USE_NEXTN_DECODE": Variable(
        0, int, "drafts per decode step", missing="decoding with a draft head"
    ),
    "ENABLE_MTP_VARLEN": Variable(
        False,
        parse_bool,
        "choose the number of drafts by their confidence",
        missing="decoding with a draft head",
    ),
    "BATCH_INVARIANT": Variable(
        False,
        parse_bool,
        "results do not depend on the batch",
        missing="batch invariance",
    ),
    "USE_MULTIMODAL_POOL": Variable(
        False, parse_bool, "keep image features in a pool", missing="image input"
    ),
    "MULTIMODAL_POOL_SIZE_GB": Variable(
        0.0, float, "size of the image feature pool", missing="image input"
    ),
    "XGRAMMAR_TIMEOUT": Variable(
        20.0, float, "seconds a grammar may compile", missing="guided decoding"
    ),
}

_warned: set[str] = set()


def get[T](name: str, kind: type[T]) -> T:
    """Value of `DEEPINFER_<name>` or its default. KeyError for an unknown variable, ValueError
    naming a malformed one, TypeError if the value is no `kind`."""
    value = given(name, kind)
    default = VARIABLES[name].default
    return _checked(name, default, kind) if value is None else value


def given[T](name: str, kind: type[T]) -> T | None:
    """What the operator has set; None if nothing. Raises as `get` does."""
    variable, text = VARIABLES[name], os.environ.get(PREFIX + name)
    if text is None:
        return None
    try:
        value = variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name}={text!r}: {error}") from error
    return _checked(name, value, kind)


def _checked[T](name: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{PREFIX}{name} is a {type(value).__name__}, asked for {kind.__name__}")
    return value


def check() -> None:
    """Looks at all `DEEPINFER_` variables that are set: ValueError for one of a feature that is not
    there yet; a warning, once, for one that does not exist."""
    for variable in (v for v in sorted(os.environ) if v.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if name not in VARIABLES:
            _warn_unknown(name)
        elif (feature := VARIABLES[name].missing) is not None:
            default = VARIABLES[name].default
            if given(name, object) != default:
                raise ValueError(
                    f"{variable}={os.environ[variable]!r}: {feature} is not available yet; the"
                    f" only value taken is {default!r}"
                )


def _warn_unknown(name: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    close = difflib.get_close_matches(name, VARIABLES, n=1)
    hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
    logger.warning("%s%s is set, and nothing reads it%s", PREFIX, name, hint)
