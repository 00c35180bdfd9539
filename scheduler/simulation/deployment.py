"""What the simulator runs: engines of each role, their scheduler limits, and the link between
prompt and completion engines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.routing.config import RouterConfig
from deepinfer_jax.scheduler.simulation.costs import StepCosts


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """`count` equal engines of `dp` ranks each. config: limits of one rank, role and ZOS included.

    acceptance: chance that a draft is accepted, given that the one before it was
    (config.num_speculative_tokens > 0). costs: seconds of this engine's steps, instead of those
    given to simulate().
    """

    config: SchedulerConfig
    count: int = 1
    dp: int = 1
    acceptance: float = 0.0
    costs: StepCosts | None = None

    def __post_init__(self) -> None:
        for name in ("count", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{self.role.name} engines: {name} must be >= 1, got {getattr(self, name)}"
                )
        if not 0 <= self.acceptance <= 1:
            raise ValueError(
                f"{self.role.name} engines: acceptance must lie in [0, 1], got {self.acceptance}"
            )

    @property
    def role(self) -> EngineType:
        return self.config.role


@dataclass(frozen=True, kw_only=True)
class Link:
    """Way of the KV from a prompt to a completion engine: latency seconds + bytes / bandwidth.
    Transfers that leave the same engine, or arrive at the same one, take turns."""

    latency: float = 1e-3
    bandwidth: float = 50e9

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"link latency must be >= 0 seconds and finite, got {self.latency}")
        if not self.bandwidth > 0:
            raise ValueError(f"link bandwidth must be > 0 bytes/s, got {self.bandwidth}")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """NORMAL engines, or PROMPT and COMPLETION ones behind the router. Raises ValueError for any
    other mix.

    reserve: fraction of max_tokens a completion engine holds blocks for before it takes a request
    (and the router counts); 1 never preempts. router: its bounds; prefix affinity applies where the
    prompt engines reuse prefixes.
    """

    name: str
    engines: tuple[EngineSpec, ...]
    link: Link = field(default_factory=Link)
    reserve: float = 1.0
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        roles = {spec.role for spec in self.engines}
        if roles != {EngineType.NORMAL} and roles != {EngineType.PROMPT, EngineType.COMPLETION}:
            found = ", ".join(sorted(role.name for role in roles)) or "none"
            raise ValueError(
                f"deployment {self.name!r} needs NORMAL engines, or PROMPT and COMPLETION engines;"
                f" it has {found}"
            )
        if not 0 <= self.reserve <= 1:
            raise ValueError(
                f"deployment {self.name!r}: reserve must lie in [0, 1], got {self.reserve}"
            )

    @property
    def num_ranks(self) -> int:
        return sum(spec.count * spec.dp for spec in self.engines)

    @property
    def is_split(self) -> bool:
        return any(spec.role.policy.splits_prefill_decode for spec in self.engines)


# ---- text form

_ALIASES = {
    "blocks": "num_blocks",
    "tokens": "max_num_batched_tokens",
    "seqs": "max_num_seqs",
    "interval": "prefill_attempt_interval",
}
_ALIASES["any_interval"] = "prefill_any_attempt_interval"
_CONFIG_TYPES = {
    f.name: str(f.type).split(" ")[0] for f in fields(SchedulerConfig) if f.name != "role"
}
_SPEC_TYPES = {"dp": "int", "engines": "int", "acceptance": "float"}
_ROUTER_TYPES = {"max_queued_tokens": "int", "max_held_requests": "int", "max_held_tokens": "int"}
_DEPLOYMENT_TYPES = {"latency": "float", "bandwidth": "float", "reserve": "float", **_ROUTER_TYPES}
_TYPES = {**_CONFIG_TYPES, **_SPEC_TYPES, **_DEPLOYMENT_TYPES, "name": "str"}
_ROLE_PREFIXES = {
    "p": EngineType.PROMPT,
    "prompt": EngineType.PROMPT,
    "d": EngineType.COMPLETION,
    "completion": EngineType.COMPLETION,
}
_BOOLEANS = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


def parse_deployment(text: str, limits: Mapping[str, Any]) -> Deployment:
    """`normal:dp=4`, `normal:2:blocks=4096,zos=0`, `pd:1P:2D`,
    `pd:2P:1D:dp=2,d.dp=8,p.tokens=16384,latency=0.002`.

    Parts are separated by colons: the kind, for `normal` optionally a number of engines, for `pd`
    nP and mD, then options name=value separated by commas. Options are the fields of
    SchedulerConfig (short forms: blocks, tokens, seqs, interval, any_interval), dp, acceptance, and
    of the whole deployment name, latency, bandwidth, reserve and the router's bounds; in `pd`, a
    prefix p. or d. means one role only. limits: SchedulerConfig fields where the text says nothing;
    zos defaults to the role's own. Raises ValueError naming the deployment and the option.
    """
    where = f"deployment {text!r}"
    kind, *parts = (part.strip() for part in text.split(":"))
    if kind not in ("normal", "pd"):
        raise ValueError(
            f"{where}: unknown kind {kind!r}; known: normal, pd (as in normal:dp=4 or pd:1P:2D)"
        )
    counts: dict[EngineType, int] = {}
    options: dict[tuple[EngineType | None, str], Any] = {}
    for part in parts:
        if not _take_count(where, kind, part, counts):
            _take_options(where, kind, part, options)
    roles = _roles(where, kind, counts)
    whole = {
        name: value
        for (role, name), value in options.items()
        if role is None and (name in _DEPLOYMENT_TYPES or name == "name")
    }
    try:
        engines = tuple(_engine(role, count, options, limits) for role, count in roles.items())
        link = Link(**{name: whole[name] for name in ("latency", "bandwidth") if name in whole})
        router = RouterConfig(**{name: whole[name] for name in _ROUTER_TYPES if name in whole})
        return Deployment(
            name=whole.get("name", text),
            engines=engines,
            link=link,
            reserve=whole.get("reserve", 1.0),
            router=router,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _take_count(where: str, kind: str, part: str, counts: dict[EngineType, int]) -> bool:
    match = re.fullmatch(r"(\d+)([PpDd]?)", part)
    if match is None:
        return False
    letter = match[2].lower()
    if (kind == "pd") != bool(letter):
        raise ValueError(
            f"{where}: {part!r} is not a number of engines; write"
            f" {'1P and 2D' if kind == 'pd' else 'a plain number'}"
        )
    role = _ROLE_PREFIXES.get(letter, EngineType.NORMAL)
    if role in counts:
        raise ValueError(f"{where}: the number of {role.name} engines is given twice")
    counts[role] = int(match[1])
    return True


def _take_options(
    where: str, kind: str, part: str, options: dict[tuple[EngineType | None, str], Any]
) -> None:
    for item in filter(None, (item.strip() for item in part.split(","))):
        name, separator, value = (piece.strip() for piece in item.partition("="))
        if not separator:
            raise ValueError(f"{where}: {item!r} is neither a number of engines nor name=value")
        prefix, dot, rest = name.partition(".")
        role = _ROLE_PREFIXES.get(prefix) if dot and kind == "pd" else None
        if dot and role is None:
            raise ValueError(
                f"{where}: unknown prefix in {name!r}; known, in pd only: p. d. prompt. completion."
            )
        name = _ALIASES.get(rest if dot else name, rest if dot else name)
        if (
            name not in _TYPES
            or (role is not None and name in (*_DEPLOYMENT_TYPES, "name"))
            or (kind == "pd" and name == "engines")
        ):
            raise ValueError(
                f"{where}: unknown option {item!r}; known:"
                f" {', '.join(sorted((*_TYPES, *_ALIASES)))}"
            )
        options[role, name] = _value(where, item, value, _TYPES[name])


def _value(where: str, item: str, value: str, kind: str) -> Any:
    try:
        if kind == "bool":
            return _BOOLEANS[value.lower()]
        return {"int": int, "float": float, "str": str}[kind](value)
    except (KeyError, ValueError):
        raise ValueError(f"{where}: option {item!r} needs a value of type {kind}") from None


def _roles(where: str, kind: str, counts: dict[EngineType, int]) -> dict[EngineType, int]:
    if kind == "normal":
        return {EngineType.NORMAL: counts.get(EngineType.NORMAL, 1)}
    missing = [
        role.name for role in (EngineType.PROMPT, EngineType.COMPLETION) if not counts.get(role)
    ]
    if missing:
        raise ValueError(
            f"{where}: no {' and no '.join(missing)} engines; write for example pd:1P:2D"
        )
    return {role: counts[role] for role in (EngineType.PROMPT, EngineType.COMPLETION)}


def _engine(
    role: EngineType, count: int, options: Mapping, limits: Mapping[str, Any]
) -> EngineSpec:
    """Options of the role itself before those for all roles before the limits."""
    given = {name: value for (of, name), value in options.items() if of is None}
    given |= {name: value for (of, name), value in options.items() if of is role}
    values = {"zos": role.policy.default_zero_overhead_scheduling, **limits, **given}
    config = {name: value for name, value in values.items() if name in _CONFIG_TYPES}
    if not role.policy.does_prefill:
        config.pop("enable_prefix_caching", None)  # it gets its KV by hand-over
    return EngineSpec(
        config=SchedulerConfig(role=role, **config),
        count=given.get("engines", count),
        dp=given.get("dp", 1),
        acceptance=given.get("acceptance", 0.0),
    )
