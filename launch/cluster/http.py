"""/healthz, /metrics and /status of a router, on a thread of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deepinfer_jax import json_text
from deepinfer_jax.engine.stats.pages import METRICS_TYPE, NO_PAGE, Page, PageServer
from deepinfer_jax.launch.cluster.core import Cluster

PREFIX = "deepinfer_router_"
ANSWER_TIMEOUT = 2.0
JSON = "application/json"


def in_hub(cluster: Cluster, question: Callable[[], Any]) -> Any:
    """The answer, from the thread that owns the cluster. queue.Empty if that thread is stuck."""
    box: queue.SimpleQueue[Any] = queue.SimpleQueue()
    cluster.hub.call(lambda: box.put(question()))
    return box.get(timeout=ANSWER_TIMEOUT)


class ClusterCollector(Collector):
    """Values are collected when scraped."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        status = in_hub(self._cluster, self._cluster.status)
        healthy = GaugeMetricFamily(PREFIX + "healthy", "1 while /healthz says 200")
        healthy.add_metric([], float(status["health"]["status"] == "ok"))
        yield healthy
        for name, text in (
            ("requests", "unfinished requests"),
            ("queued", "parts no engine has yet"),
            ("clients", "connected clients"),
        ):
            family = GaugeMetricFamily(PREFIX + name, text)
            family.add_metric([], status[name])
            yield family
        events = CounterMetricFamily(
            PREFIX + "events", "what has happened, by kind", labels=["event"]
        )
        for name, value in status["counters"].items():
            events.add_metric([name], value)
        yield events
        engines = GaugeMetricFamily(
            PREFIX + "engines", "engines by role and state", labels=["role", "state"]
        )
        counts: dict[tuple[str, str], int] = {}
        for e in status["engines"]:
            counts[e["role"], e["state"]] = counts.get((e["role"], e["state"]), 0) + 1
        for key, value in counts.items():
            engines.add_metric(list(key), value)
        yield engines
        for name, text in (
            ("waiting", "requests that wait in an engine"),
            ("running", "requests that run in an engine"),
            ("cache", "share of an engine's blocks in use"),
            ("stuck", "seconds an engine's current step has taken"),
        ):
            family = GaugeMetricFamily(f"{PREFIX}engine_{name}", text, labels=["engine", "role"])
            for e in status["engines"]:
                family.add_metric([e["name"], e["role"]], e.get(name, 0.0))
            yield family


def serve_http(cluster: Cluster, host: str, port: int) -> PageServer:
    """OSError, naming the address, if it cannot be bound."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ClusterCollector(cluster))

    def page(path: str) -> Page:
        match path.partition("?")[0]:
            case "/healthz":
                healthy, body = in_hub(cluster, cluster.health)
                return Page(json_text.dumps(body), JSON, 200 if healthy else 503)
            case "/metrics":
                return Page(generate_latest(registry).decode(), METRICS_TYPE)
            case "/status":
                return Page(json_text.dumps(in_hub(cluster, cluster.status)), JSON)
            case _:
                return NO_PAGE

    def answer(path: str) -> Page:
        try:
            return page(path)
        except queue.Empty:
            problem = f"the router's thread has not answered for {ANSWER_TIMEOUT} s"
            body = {"status": "unhealthy", "problems": [problem]}
            return Page(json_text.dumps(body), JSON, 503)

    try:
        return PageServer(host, port, answer)
    except OSError as error:
        raise OSError(error.errno, f"http {error.strerror}") from error
