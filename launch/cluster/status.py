"""A router seen from outside: its health, and the status table's values."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sized
from typing import Any, Protocol

import msgspec

from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.launch.cluster.members import EngineMember
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.rpc.messages import ModelInfo
from deepinfer_jax.scheduler.routing.router import Router


class Limits(Protocol):
    @property
    def stall_timeout(self) -> float: ...


class ClusterView(Protocol):
    """What is shown of a cluster."""

    router: Router
    coordinator: Coordinator
    members: dict[str, EngineMember]
    clients: Sized
    gone: deque[dict[str, Any]]
    counters: Counter[str]
    model: ModelInfo | None
    hub: Hub
    draining: bool
    last_progress: float

    @property
    def config(self) -> Limits: ...


def missing(router: Router, members: Iterable[EngineMember]) -> list[str]:
    """What is missing, in words."""
    unlinked = any(m.active and not m.linked for m in members)
    return [
        f"no {role} engine"
        + (" that reaches a completion engine" if role == "prompt" and unlinked else "")
        for role in router.missing()
    ]


def health(cluster: ClusterView) -> tuple[bool, dict[str, Any]]:
    """Healthy: every role is there, no engine is stuck, and unfinished requests have moved within
    stall_timeout."""
    problems = missing(cluster.router, cluster.members.values())
    for m in list(cluster.members.values()):
        if m.channel.peer_ping.stuck > cluster.config.stall_timeout / 2:
            problems.append(f"{m.name}: its step has taken {m.channel.peer_ping.stuck:.1f} s")
    idle = time.monotonic() - cluster.last_progress
    requests = len(cluster.coordinator.requests)
    if requests and idle > cluster.config.stall_timeout:
        problems.append(f"{requests} requests, no progress for {idle:.1f} s")
    if not cluster.hub.thread.is_alive():
        problems.append("the network thread has ended")
    if cluster.draining:
        problems.append("draining")
    return not problems, {
        "status": "ok" if not problems else "unhealthy",
        "problems": problems,
        "requests": requests,
    }


def status(cluster: ClusterView) -> dict[str, Any]:
    """Plain values for `deepinfer-jax status`."""
    stats, now = cluster.router.stats(), cluster.hub.clock()
    loads = {**stats["prompt"], **stats["completion"]}
    engines = [
        {
            **msgspec.structs.asdict(m.channel.peer_ping.gauges),
            **{f"routed_{k}": v for k, v in loads.get(m.name, {}).items()},
            "name": m.name,
            "role": m.kind,
            "job": m.hello.job,
            "process": m.hello.process,
            "state": m.state,
            "mesh": msgspec.structs.asdict(m.hello.model.mesh),
            "seen": now - m.channel.last_seen,
            "stuck": m.channel.peer_ping.stuck,
        }
        for m in cluster.members.values()
    ]
    return {
        "health": health(cluster)[1],
        "engines": engines,
        "gone": list(cluster.gone),
        "clients": len(cluster.clients),
        "requests": len(cluster.coordinator.requests),
        "queued": stats["queued"],
        "counters": {
            **cluster.counters,
            **{f"router_{k}": v for k, v in stats.items() if isinstance(v, int)},
            **{f"connections_{k}": v for k, v in cluster.hub.counters.items()},
        },
        "model": None if cluster.model is None else msgspec.to_builtins(cluster.model),
    }
