"""What the server itself counts, beside the engines' own metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from deepinfer_jax.engine.stats.prometheus import EngineCollector
from deepinfer_jax.rpc.client import RemoteEngine
from deepinfer_jax.serve.errors import ApiError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """A registry of the server's own, with those of every engine of this process."""

    def __init__(self, engine: Any) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        name = "deepinfer_http"
        self.requests = Counter(
            f"{name}_requests",
            "answers by path and status",
            ("path", "status"),
            registry=self.registry,
        )
        self.live = Gauge(f"{name}_live", "requests being answered", registry=self.registry)
        self.first = Histogram(
            f"{name}_first_byte_seconds",
            "from a request to its answer's first byte",
            ("path",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        for one in engines_of(engine):
            self.registry.register(EngineCollector(one))
        if isinstance(engine, RemoteEngine):
            self.registry.register(DeploymentCollector(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def engines_of(engine: Any) -> list[Any]:
    """The engines of this process behind what `LLM` built; none behind a router."""
    workers = getattr(engine, "workers", None)
    if workers is not None:
        return [w.engine for w in workers.values()]
    return [engine] if hasattr(engine, "stats_log") else []


def status_of(engine: Any) -> dict[str, Any]:
    """What the page shows: engines by role, queues, KV use, token counts."""
    if isinstance(engine, RemoteEngine):
        return _deployment(engine)
    rows = []
    for one in engines_of(engine):
        totals, schedulers = one.stats_log.totals, one.schedulers
        rows.append(
            {
                "name": one.name,
                "role": one.config.role.name,
                "waiting": sum(s.num_waiting for s in schedulers),
                "prompted": sum(s.num_prompted for s in schedulers),
                "running": sum(s.num_running for s in schedulers),
                "cache": max(s.cache_usage for s in schedulers),
                "prompt_tokens": totals["prompt_tokens"],
                "generated_tokens": totals["generated_tokens"],
                "preemptions": totals["preemptions"],
            }
        )
    found: dict[str, Any] = {"time": time.time(), "engines": rows}
    counters = {}
    for one in engines_of(engine):
        for side in ("sender", "receiver"):
            if hasattr(one, side):
                counters[one.name] = dict(getattr(one, side).counters)
    if counters:
        found["handoff"] = counters
    return found


def _deployment(engine: RemoteEngine) -> dict[str, Any]:
    """The same of a router's deployment, from what the router knows. ApiError 503 when it does not
    answer."""
    try:
        known = engine.stats()
    except (ConnectionError, TimeoutError) as error:
        raise ApiError(str(error), status=503) from error
    names = ("name", "role", "state", "waiting", "running", "cache", "hand_overs", "steps")
    rows = [{name: e[name] for name in names if name in e} for e in known["engines"]]
    return {
        "time": time.time(),
        "engines": rows,
        "router": {name: known[name] for name in ("requests", "queued", "counters", "health")},
    }


class DeploymentCollector:
    """Gauges per engine of a router's deployment; their time to first token and the like are in the
    engines' own endpoints."""

    GAUGES: ClassVar = {
        "waiting": "sequences that wait",
        "running": "sequences that decode",
        "cache": "share of the KV blocks in use",
        "hand_overs": "hand-overs under way",
    }

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        try:
            engines = _deployment(self._engine)["engines"]
        except ApiError:
            engines = []
        yield GaugeMetricFamily("deepinfer_engines", "engines that the router knows", len(engines))
        for name, text in self.GAUGES.items():
            family = GaugeMetricFamily(f"deepinfer_engine_{name}", text, labels=("engine", "role"))
            for e in engines:
                if name in e:
                    family.add_metric((e["name"], str(e["role"])), e[name])
            yield family
