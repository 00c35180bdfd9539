"""Plots of simulations as one PNG: distributions of the latencies on top, a timeline per deployment
below."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.simulation.result import EngineUsage, SimulationResult

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("plots need matplotlib: pip install 'deepinfer-jax[plot]'") from error

_BINS = 200
_ROLE_COLOURS = {
    EngineType.NORMAL: "tab:blue",
    EngineType.PROMPT: "tab:orange",
    EngineType.COMPLETION: "tab:green",
}


def draw(results: list[SimulationResult], path: str | Path) -> None:
    """Writes the figure: distribution of TTFT, tail of the inter-token latency, and per deployment
    tokens and KV over time.

    The suffix of `path` decides the format. Raises ValueError for one that matplotlib cannot write.
    """
    # Figure instead of pyplot: no global state, no display.
    figure = Figure(figsize=(12, 4 + 2.6 * len(results)), layout="constrained")
    grid = figure.add_gridspec(1 + len(results), 2, height_ratios=[1.4] + [1.0] * len(results))
    ttft, itl = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    for result in results:
        values = np.sort(result.requests.ttft[~np.isnan(result.requests.ttft)])
        _distribution(ttft, values, np.ones(values.size), result.deployment)
        order = np.argsort(result.gap_seconds, kind="stable")
        _tail(itl, result.gap_seconds[order], result.gap_counts[order], result.deployment)
    _finish(ttft, "time to first token (s)", "share of requests")
    ttft.set_ylim(0, 1.02)
    _finish(itl, "inter-token latency (s)", "share of tokens that came later")
    itl.set_yscale("log")
    end = max(result.seconds for result in results)
    for row, result in enumerate(results, 1):
        _tokens_over_time(figure.add_subplot(grid[row, 0]), result, end)
        _occupancy(figure.add_subplot(grid[row, 1]), result, end)
    figure.savefig(path, dpi=120)


def _distribution(axes: Axes, values: np.ndarray, counts: np.ndarray, label: str) -> None:
    if values.size:
        axes.step(values, np.cumsum(counts) / counts.sum(), where="post", label=label)


def _tail(axes: Axes, values: np.ndarray, counts: np.ndarray, label: str) -> None:
    """1 - distribution: a stalled decode shows in one token of hundreds."""
    if values.size:
        later = 1 - np.cumsum(counts) / counts.sum()
        axes.step(values[:-1], later[:-1], where="post", label=label)


def _finish(axes: Axes, x: str, y: str) -> None:
    if axes.lines:
        positive = [line.get_xdata()[line.get_xdata() > 0] for line in axes.lines]
        if all(values.size for values in positive):
            axes.set_xscale("log")
        axes.legend(fontsize="small")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)


def _tokens_over_time(axes: Axes, result: SimulationResult, end: float) -> None:
    edges = np.linspace(0, end, _BINS + 1)
    for prefill, label in ((True, "prefill tokens/s"), (False, "decode tokens/s")):
        rate = sum(_rate(engine, prefill, edges) for engine in result.engines)
        axes.stairs(rate, edges, label=label)
    axes.set(title=result.deployment, xlabel="time (s)", yscale="symlog")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="lower left")
    axes.grid(alpha=0.3)


def _rate(engine: EngineUsage, prefill: bool, edges: np.ndarray) -> np.ndarray:
    chosen = (engine.is_prefill == prefill) & (engine.seconds > 0)
    tokens, _ = np.histogram(engine.time[chosen], edges, weights=engine.tokens[chosen])
    return tokens / np.diff(edges)


def _occupancy(axes: Axes, result: SimulationResult, end: float) -> None:
    """Share of KV blocks held, a line per engine, and the waiting sequences of all."""
    for engine in result.engines:
        time, usage = np.append(engine.time, end), np.append(engine.cache_usage, 0.0)
        axes.step(
            time, usage, where="post", color=_ROLE_COLOURS[engine.role], alpha=0.7, linewidth=0.8
        )
    for role in {engine.role: None for engine in result.engines}:
        axes.plot([], [], color=_ROLE_COLOURS[role], label=f"{role.name} KV held")
    axes.set(title=result.deployment, xlabel="time (s)", xlim=(0, end))
    axes.set_ylim(bottom=0)
    waiting = axes.twinx()
    times = np.concatenate([engine.time for engine in result.engines])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.diff(engine.waiting, prepend=0) for engine in result.engines])
    waiting.step(
        times[order], np.cumsum(changes[order]), where="post", color="tab:red", linewidth=0.8
    )
    waiting.set_ylabel("waiting", color="tab:red")
    waiting.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="upper left")
    axes.grid(alpha=0.3)
