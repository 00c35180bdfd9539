"""The opt-in Prometheus endpoint of one engine. Values are collected when scraped; a step pays
nothing for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deepinfer_jax.engine.stats.histogram import Histogram
from deepinfer_jax.engine.stats.metrics import EngineStats
from deepinfer_jax.engine.stats.pages import METRICS_TYPE, NO_PAGE, Page, PageServer
from deepinfer_jax.engine.stats.source import StatsSource
from deepinfer_jax.experts.report import BalanceReport

PREFIX = "deepinfer_"
LABELS = ("model_name", "engine")
KV_GAUGES = {
    "loading": "sequences that wait for a stored prefix",
    "host_pages": "pages in host memory",
    "host_bytes": "bytes of pages in host memory",
    "disk_disabled": "1 while the disk is not written to after a failure (full, not permitted)",
}


class MeasuredEngine(StatsSource, Protocol):
    """An engine with its statistics."""

    stats_log: EngineStats


class EngineCollector(Collector):
    """Turns an engine's statistics into metric families, labelled with the served model's name and
    the engine's."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._labels = [engine.args.served_model_name, engine.name]

    def collect(self) -> Iterator[Metric]:
        stats, schedulers = self._engine.stats_log, self._engine.schedulers
        t = stats.totals
        yield self._counter(
            "prompt_tokens", "prompt tokens prefilled, recomputed ones included", t["prompt_tokens"]
        )
        yield self._counter("generation_tokens", "tokens generated", t["generated_tokens"])
        yield self._counter(
            "preemptions", "sequences preempted for lack of blocks", t["preemptions"]
        )
        compiles = self._engine.runner.programs.compiles_after_warm_up
        yield self._counter(
            "compiles_after_warm_up", "step programs compiled after warm-up", compiles
        )
        yield self._counter(
            "xla_compiles_after_warm_up",
            "all compilations of the process after warm-up",
            stats.xla_compiles_after_warm_up,
        )
        yield self._counters(
            "steps", "engine steps", "type", {k: h.count for k, h in stats.step_seconds.items()}
        )
        yield self._counters(
            "requests_finished",
            "completions by how they ended",
            "reason",
            dict(stats.finish_reasons),
        )
        used = dict(stats.programs)
        yield self._counters(
            "rows",
            "rows of compiled steps that held a token",
            "program",
            {k: v[1] for k, v in used.items()},
        )
        yield self._counters(
            "padded_rows",
            "rows of compiled steps, padding included",
            "program",
            {k: v[2] for k, v in used.items()},
        )
        for name, meaning in (
            ("waiting", "not prefilled"),
            ("prompted", "prefilled, without a slot"),
            ("running", "with a slot"),
        ):
            yield self._gauge(
                f"requests_{name}",
                f"sequences {meaning}",
                sum(getattr(s, f"num_{name}") for s in schedulers),
            )
        yield self._gauge(
            "cache_usage_ratio",
            "blocks in use, of the fullest rank",
            max(s.cache_usage for s in schedulers),
        )
        yield self._gauge("cache_blocks", "blocks per rank", self._engine.runner.num_blocks)
        if self._engine.prefix_store is not None:
            pages = self._engine.prefix_store.stats()
            for name in KV_GAUGES.keys() & pages.keys():
                yield self._gauge(f"kv_store_{name}", KV_GAUGES[name], float(pages.pop(name)))
            yield self._counters(
                "kv_store_pages",
                "pages (errors: failures) of the KV store by what became of them",
                "event",
                pages,
            )
        if self._engine.experts is not None:
            yield from self._balance(self._engine.experts.report)
        yield self._histogram(
            "time_to_first_token_seconds", "from a request's arrival", {"": stats.ttft}
        )
        yield self._histogram(
            "inter_token_seconds",
            "between a sequence's tokens, as they reach the host",
            {"": stats.inter_token},
        )
        yield self._histogram("step_seconds", "wall time of a step", stats.step_seconds, "type")
        yield self._histogram(
            "step_host_seconds", "scheduling, building inputs, dispatch", stats.host_seconds, "type"
        )
        yield self._histogram(
            "device_idle_seconds", "before a decode step, at most", {"": stats.device_idle}
        )

    def _balance(self, report: BalanceReport) -> Iterator[Metric]:
        what = "tokens of the most loaded rank over those of the mean rank"
        for name, values, when in (
            ("expert_imbalance_ratio", report.now, "with the placement as it is"),
            ("expert_imbalance_before_ratio", report.before, "before experts last moved"),
        ):
            layers = {str(layer): float(value) for layer, value in enumerate(values)}
            yield self._gauges(name, f"{what}, {when}", "layer", layers)
        yield self._gauge(
            "expert_placement_version", "rearrangements that led here", report.version
        )
        yield self._counter("expert_rearrangements", "times experts moved", report.rearrangements)
        yield self._counter(
            "expert_slots_moved", "physical experts that were exchanged", report.slots_moved
        )

    def _gauges(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric([*self._labels, key], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric([*self._labels, key], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(
        self, name: str, text: str, histograms: dict[str, Histogram], label: str | None = None
    ) -> Metric:
        family = HistogramMetricFamily(
            PREFIX + name, text, labels=(*LABELS, label) if label else LABELS
        )
        for key, h in histograms.items():
            family.add_metric(
                [*self._labels, key] if label else self._labels,
                buckets=h.cumulative(),
                sum_value=h.sum,
            )
        return family


class MetricsServer:
    """http://<host>:<port>/metrics of one engine, on a daemon thread, from a registry
    of its own."""

    def __init__(self, engine: MeasuredEngine, host: str, port: int) -> None:
        """port 0 takes any free one. OSError, naming the address, if it cannot be bound."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine))
        try:
            self._server = PageServer(host, port, self._page)
        except OSError as error:
            raise OSError(error.errno, f"metrics_{error.strerror}") from error
        self.host, self.port = host, self._server.server_port

    def _page(self, path: str) -> Page:
        if path.partition("?")[0] not in ("/metrics", "/"):
            return NO_PAGE
        return Page(generate_latest(self.registry).decode(), METRICS_TYPE)

    def close(self) -> None:
        self._server.close()
