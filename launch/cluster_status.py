"""A router seen from outside: its health, and the status table's values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.launch.cluster import Cluster


def missing(cluster: Cluster) -> list[str]:
    """What is missing, in words."""
    unlinked = any(w.active and not w.linked for w in cluster.workers.values())
    return [
        f"no {role} engine"
        + (" that reaches a completion engine" if role == "prompt" and unlinked else "")
        for role in cluster.router.missing()
    ]


def health(cluster: Cluster) -> tuple[bool, dict[str, Any]]:
    """Healthy: every role is there, no engine is stuck, and unfinished requests have moved within
    stall_timeout."""
    problems = missing(cluster)
    for w in list(cluster.workers.values()):
        if w.channel.peer_ping.stuck > cluster.config.stall_timeout / 2:
            problems.append(f"{w.name}: its step has taken {w.channel.peer_ping.stuck:.1f} s")
    idle = time.monotonic() - cluster.last_progress
    if cluster._requests and idle > cluster.config.stall_timeout:
        problems.append(f"{len(cluster._requests)} requests, no progress for {idle:.1f} s")
    if not cluster.hub.thread.is_alive():
        problems.append("the network thread has ended")
    if cluster.draining:
        problems.append("draining")
    return not problems, {
        "status": "ok" if not problems else "unhealthy",
        "problems": problems,
        "requests": len(cluster._requests),
    }


def status(cluster: Cluster) -> dict[str, Any]:
    """Plain values for `deepinfer-jax status`."""
    stats, now = cluster.router.stats(), cluster.hub.clock()
    engines = [
        {
            "name": w.name,
            "role": w.kind,
            "job": w.hello.job,
            "process": w.hello.process,
            "state": w.state,
            "mesh": (w.hello.model or {}).get("mesh", {}),
            "seen": now - w.channel.last_seen,
            "stuck": w.channel.peer_ping.stuck,
            **w.channel.peer_ping.gauges,
            **{
                f"routed_{k}": v
                for k, v in (
                    stats["prompt"].get(w.name) or stats["completion"].get(w.name) or {}
                ).items()
            },
        }
        for w in cluster.workers.values()
    ]
    return {
        "health": health(cluster)[1],
        "engines": engines,
        "gone": list(cluster.gone),
        "clients": len(cluster.clients),
        "requests": len(cluster._requests),
        "queued": stats["queued"],
        "counters": {
            **cluster.counters,
            **{f"router_{k}": v for k, v in stats.items() if isinstance(v, int)},
            **{f"connections_{k}": v for k, v in cluster.hub.counters.items()},
        },
        "model": cluster.model,
    }
