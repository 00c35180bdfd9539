"""What a simulation measures: per request, per token gap, per engine; and its summary as numbers,
text and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.scheduler.roles import EngineType

PERCENTILES = (50, 90, 99)
COMPLETED_REASONS = ("stop", "length")


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestTable:
    """One row per request of the trace, in its order. Times are f64 [n] seconds, NaN for what never
    happened.

    arrival, first_scheduled (its first step starts on the device), first_token, finished.
    output_tokens, preemptions: i64 [n]. finish_reason: "stop" and "length" completed, anything else
    did not. engine: where it ended.
    """

    arrival: np.ndarray
    first_scheduled: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    prompt_tokens: np.ndarray
    hit_tokens: np.ndarray
    output_tokens: np.ndarray
    preemptions: np.ndarray
    finish_reason: tuple[str, ...]
    engine: tuple[str, ...]

    @property
    def completed(self) -> np.ndarray:
        """bool [n]"""
        return np.array([reason in COMPLETED_REASONS for reason in self.finish_reason], bool)

    @property
    def queue(self) -> np.ndarray:
        """f64 [n] seconds from arrival to the first step."""
        return self.first_scheduled - self.arrival

    @property
    def ttft(self) -> np.ndarray:
        """f64 [n] seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def latency(self) -> np.ndarray:
        """f64 [n] seconds from arrival to the last token."""
        return self.finished - self.arrival

    @property
    def tpot(self) -> np.ndarray:
        """f64 [n] mean seconds per output token after the first; NaN with fewer than two tokens."""
        gaps = self.output_tokens - 1
        return np.where(gaps > 0, (self.finished - self.first_token) / np.maximum(gaps, 1), np.nan)


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineUsage:
    """One engine over time. busy_seconds: its device computes. Timeline arrays have one entry per
    step and per idle moment.

    time: f64, when the step starts; seconds: f64, 0 when idle; is_prefill: bool; tokens: i64 rows
    of all ranks; running, waiting: i64 sequences of all ranks (waiting counts prompted ones);
    cache_usage: f64 in [0, 1], mean of the ranks.
    """

    name: str
    role: EngineType
    ranks: int
    time: np.ndarray
    seconds: np.ndarray
    is_prefill: np.ndarray
    tokens: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    cache_usage: np.ndarray

    @property
    def busy_seconds(self) -> float:
        return float(self.seconds.sum())

    @property
    def num_steps(self) -> int:
        return int((self.seconds > 0).sum())

    def mean_over_time(self, values: np.ndarray, until: float) -> float:
        """Mean of a timeline array from 0 to `until`, each value holding until the next one."""
        if not self.time.size or until <= 0:
            return 0.0
        spans = np.diff(np.minimum(np.append(self.time, until), until))
        return float((values * spans).sum() / until)


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulationResult:
    """Outcome of one simulation. seconds: from the first arrival to the last event; gap_seconds f64
    [k], gap_counts i64 [k]: the inter-token gaps of all requests, equal ones counted together.
    rank_steps: steps scheduled, counted per rank."""

    deployment: str
    trace: str
    num_ranks: int
    seconds: float
    rank_steps: int
    requests: RequestTable
    engines: tuple[EngineUsage, ...]
    gap_seconds: np.ndarray
    gap_counts: np.ndarray
    transfers: int = 0
    transfer_seconds: float = 0.0
    """Sum over the transfers, waiting for a free link and for room on the receiving side included.
    """

    def itl(self, percentile: float) -> float:
        """Inter-token latency in seconds at a percentile in [0, 100]: the smallest gap with at
        least that share at or below it."""
        return weighted_percentile(self.gap_seconds, self.gap_counts, percentile)

    def ttft(self, percentile: float) -> float:
        """Time to first token in seconds at a percentile, over the requests that got one."""
        return _percentile(self.requests.ttft, percentile)

    def attainment(self, *, ttft: float = math.inf, tpot: float = math.inf) -> float:
        """Share of all requests that completed with their TTFT and their mean time per later token
        within the targets (s)."""
        r = self.requests
        within = r.completed & (r.ttft <= ttft) & (np.nan_to_num(r.tpot, nan=0.0) <= tpot)
        return float(within.mean())

    def summary(self) -> dict[str, Any]:
        """Numbers only, ready for JSON: seconds, tokens per second, shares in [0, 1]; null where
        nothing was measured."""
        r = self.requests
        done = r.completed
        span = self.seconds or math.nan
        return {
            "deployment": self.deployment,
            "trace": self.trace,
            "ranks": self.num_ranks,
            "seconds": self.seconds,
            "requests": len(done),
            "completed": int(done.sum()),
            "failed": _counts(
                [reason for reason, ok in zip(r.finish_reason, done, strict=True) if not ok]
            ),
            "preemptions": int(r.preemptions.sum()),
            "requests_per_second": _number(done.sum() / span),
            "prompt_tokens_per_second": _number(
                r.prompt_tokens[~np.isnan(r.first_token)].sum() / span
            ),
            "output_tokens_per_second": _number(r.output_tokens.sum() / span),
            "prefix_hit_rate": _number(r.hit_tokens.sum() / r.prompt_tokens.sum()),
            "queue_seconds": _spread(r.queue),
            "ttft_seconds": _spread(r.ttft),
            "itl_seconds": self._itl_spread(),
            "tpot_seconds": _spread(r.tpot[done]),
            "latency_seconds": _spread(r.latency[done]),
            "transfers": self.transfers,
            "mean_transfer_seconds": _number(self.transfer_seconds / self.transfers)
            if self.transfers
            else None,
            "rank_steps": self.rank_steps,
            "engines": [self._engine_summary(engine) for engine in self.engines],
        }

    def _itl_spread(self) -> dict[str, float | None]:
        if not self.gap_seconds.size:
            return _spread(self.gap_seconds)
        mean = float(self.gap_seconds @ self.gap_counts / self.gap_counts.sum())
        return {
            "mean": mean,
            **{f"p{p}": self.itl(p) for p in PERCENTILES},
            "max": float(self.gap_seconds.max()),
        }

    def _engine_summary(self, engine: EngineUsage) -> dict[str, Any]:
        return {
            "name": engine.name,
            "role": engine.role.name,
            "ranks": engine.ranks,
            "steps": engine.num_steps,
            "prefill_steps": int((engine.is_prefill & (engine.seconds > 0)).sum()),
            "utilisation": _number(engine.busy_seconds / self.seconds) if self.seconds else None,
            "mean_running": engine.mean_over_time(engine.running, self.seconds),
            "max_running": int(engine.running.max(initial=0)),
            "max_waiting": int(engine.waiting.max(initial=0)),
            "mean_cache_usage": engine.mean_over_time(engine.cache_usage, self.seconds),
            "max_cache_usage": float(engine.cache_usage.max(initial=0.0)),
        }

    def table(self) -> str:
        """summary() as text."""
        return results_table([self])


def weighted_percentile(values: np.ndarray, counts: np.ndarray, percentile: float) -> float:
    """Smallest value with at least `percentile` % of the counts at or below it; NaN of nothing."""
    if not values.size:
        return math.nan
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(cumulative, percentile / 100 * cumulative[-1])])


def _percentile(values: np.ndarray, percentile: float) -> float:
    values = values[~np.isnan(values)]
    return (
        float(np.percentile(values, percentile, method="inverted_cdf")) if values.size else math.nan
    )


def _spread(values: np.ndarray) -> dict[str, float | None]:
    values = values[~np.isnan(values)]
    names = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    if not values.size:
        return dict.fromkeys(names)
    return dict(
        zip(
            names,
            (
                float(values.mean()),
                *(_percentile(values, p) for p in PERCENTILES),
                float(values.max()),
            ),
            strict=True,
        )
    )


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _counts(reasons: list[str]) -> dict[str, int]:
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


# ---- text


def results_table(results: list[SimulationResult]) -> str:
    """One column per result: throughput, latencies in milliseconds, then one line per engine."""
    summaries = [result.summary() for result in results]
    rows = [("", [s["deployment"] for s in summaries])]
    rows += [(label, [_text(cell(s)) for s in summaries]) for label, cell in _ROWS]
    for key, label in _SPREADS:
        for part in ("p50", "p90", "p99", "max"):
            rows.append((f"{label} {part} ms", [_milliseconds(s[key][part]) for s in summaries]))
    width = max(len(label) for label, _ in rows)
    columns = [max(len(cells[i]) for _, cells in rows) for i in range(len(results))]
    lines = [
        f"{label:<{width}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(cells, columns, strict=True))
        for label, cells in rows
    ]
    return "\n".join([*lines, "", *_engine_lines(summaries)])


_ROWS = (
    ("ranks", lambda s: s["ranks"]),
    ("simulated s", lambda s: s["seconds"]),
    ("requests", lambda s: s["requests"]),
    ("completed", lambda s: s["completed"]),
    ("failed", lambda s: ", ".join(f"{n} {reason}" for reason, n in s["failed"].items()) or 0),
    ("preemptions", lambda s: s["preemptions"]),
    ("requests/s", lambda s: s["requests_per_second"]),
    ("prompt tok/s", lambda s: s["prompt_tokens_per_second"]),
    ("output tok/s", lambda s: s["output_tokens_per_second"]),
    ("prefix hits", lambda s: f"{s['prefix_hit_rate'] or 0:.0%}"),
)
_SPREADS = (
    ("queue_seconds", "queue"),
    ("ttft_seconds", "TTFT"),
    ("itl_seconds", "ITL"),
    ("latency_seconds", "latency"),
)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return str(value)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.4g}"


def _engine_lines(summaries: list[dict[str, Any]]) -> list[str]:
    header = (
        "deployment",
        "engine",
        "ranks",
        "steps",
        "prefills",
        "busy",
        "running mean",
        "max",
        "waiting max",
        "KV mean",
        "max",
    )
    rows = [header]
    for s in summaries:
        for e in s["engines"]:
            counts = (
                str(e["ranks"]),
                str(e["steps"]),
                str(e["prefill_steps"]),
                f"{e['utilisation'] or 0:.0%}",
            )
            load = (f"{e['mean_running']:.1f}", str(e["max_running"]), str(e["max_waiting"]))
            rows.append(
                (
                    s["deployment"],
                    e["name"],
                    *counts,
                    *load,
                    f"{e['mean_cache_usage']:.0%}",
                    f"{e['max_cache_usage']:.0%}",
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return [
        "  ".join(
            f"{c:<{w}}" if i < 2 else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
