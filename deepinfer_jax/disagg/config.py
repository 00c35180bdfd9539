"""What a disaggregated deployment consists of: how many engines of each role, on which devices,
with which arguments."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.config import EngineArgs
from deepinfer_jax.disagg.protocol import HandoffConfig
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.routing.config import RouterConfig

ROLE_FIELDS = {
    EngineType.PROMPT: {},
    EngineType.COMPLETION: {
        "stop_preempted_request": True,
        "chunked_prefill": False,
        "enable_prefix_caching": False,
        "prefill_buckets": None,
    },
}
"""What a role cannot leave to the arguments both roles share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisaggregationConfig:
    """prompt_engines, completion_engines: how many. prompt_mesh, completion_mesh: EngineArgs fields
    of that role (parallel sizes, buckets, num_blocks, ...), and "devices" to choose them. handoff:
    None is HandoffConfig(), with ten times its time-out where steps may compile (no warm-up).
    router: None gives each prompt engine about four steps' worth of prompts at a time.
    stall_timeout: seconds one step may take before its engine counts as dead; None: no limit (a
    first step may compile)."""

    prompt_engines: int = 1
    completion_engines: int = 1
    prompt_mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    completion_mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    handoff: HandoffConfig | None = None
    router: RouterConfig | None = None
    reserve_fraction: float = 1.0
    stall_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.prompt_engines < 1 or self.completion_engines < 1:
            raise ValueError(
                "need at least one engine of each role, got"
                f" {self.prompt_engines}P:{self.completion_engines}D"
            )

    @classmethod
    def parse(cls, spec: str | None, **fields: Any) -> DisaggregationConfig:
        """ "2P:1D" -> two prompt engines, one completion engine; None: one each."""
        if spec is None:
            return cls(**fields)
        match = re.fullmatch(r"\s*(\d+)\s*[pP]\s*:\s*(\d+)\s*[dDcC]\s*", spec)
        if match is None:
            raise ValueError(f'disaggregate must look like "2P:1D", got {spec!r}')
        return cls(prompt_engines=int(match[1]), completion_engines=int(match[2]), **fields)


def role_args(
    fields: Mapping[str, Any], config: DisaggregationConfig, role: EngineType
) -> EngineArgs:
    """EngineArgs of one role: shared fields, what the role demands, then its own. A shared file of
    expert placement becomes one per role: what tokens choose differs between them. Both roles keep
    state where the prompt side needs it."""
    own = config.prompt_mesh if role is EngineType.PROMPT else config.completion_mesh
    own = {k: v for k, v in own.items() if k != "devices"}
    shared = dict(fields)
    if shared.get("expert_placement") is not None:
        shared["expert_placement"] += f".{role.name.lower()}"
    if shared.get("state_in_blocks") is None:
        prompt = {**shared, **config.prompt_mesh}
        prompt.pop("devices", None)
        shared["state_in_blocks"] = EngineArgs(**prompt).keeps_state_in_blocks
    return EngineArgs(**{**shared, **ROLE_FIELDS[role], **own, "engine_type": role})


def devices_of(args: EngineArgs) -> int:
    """Devices one engine needs."""
    return max(args.data_parallel_size, args.expert_parallel_size, 1) * args.tensor_parallel_size


def assign_devices(
    args: Mapping[EngineType, EngineArgs], config: DisaggregationConfig, devices: list[Any]
) -> dict[EngineType, list[list[Any]]]:
    """Devices of every engine: consecutive ones, prompt engines first. With too few, engines of one
    device share them in turn; larger ones are refused (two threads must not run collectives over
    the same devices)."""
    counts = {
        EngineType.PROMPT: config.prompt_engines,
        EngineType.COMPLETION: config.completion_engines,
    }
    given = {
        EngineType.PROMPT: config.prompt_mesh.get("devices"),
        EngineType.COMPLETION: config.completion_mesh.get("devices"),
    }
    need = {role: devices_of(a) for role, a in args.items()}
    total = sum(counts[r] * need[r] for r in counts if given[r] is None)
    if total > len(devices) and max(need.values()) > 1:
        parts = " + ".join(f"{counts[r]} x {need[r]}" for r in counts)
        raise ValueError(
            f"{parts} devices needed for {counts[EngineType.PROMPT]} prompt and"
            f" {counts[EngineType.COMPLETION]} completion engines, {len(devices)} available"
        )
    pool = itertools.cycle(devices)
    out: dict[EngineType, list[list[Any]]] = {}
    for role, count in counts.items():
        own = given[role]
        source = pool if own is None else itertools.cycle(own)
        if own is not None and len(own) < need[role] * count and need[role] > 1:
            raise ValueError(
                f"{count} {role.name} engines of {need[role]} devices need {need[role] * count},"
                f" got {len(own)}"
            )
        out[role] = [[next(source) for _ in range(need[role])] for _ in range(count)]
    return out
