"""What an engine records per step and per request. Host clocks only: no timing adds a device
synchronisation."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepinfer_jax import environ
from deepinfer_jax.engine.stats.histogram import Histogram
from deepinfer_jax.engine.stats.source import StatsSource
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.runner.model_runner import InFlight
from deepinfer_jax.scheduler.outputs import SchedulerOutputs, StepType

logger = logging.getLogger(__name__)

RECORDS_KEPT = 4096
STEP_KINDS = ("prefill", "decode")
TOTALS = (
    "steps",
    "prefill_steps",
    "decode_steps",
    "prompt_tokens",
    "generated_tokens",
    "decode_rows",
    "preemptions",
    "padded_prefill_tokens",
    "padded_decode_tokens",
    "requests_finished",
)
"""Counters since construction. prompt_tokens: rows of prefill steps, recomputed ones included;
decode_rows: rows of decode steps, those included whose sequence turned out to have ended;
generated_tokens: tokens that requests got."""


@dataclass(slots=True)
class StepRecord:
    """One engine step. Times are seconds; tokens and sequences are summed over the local ranks."""

    start: float
    step_type: str  # prefill | decode | idle
    sequences: int
    tokens: int
    padded_tokens: int  # rows of the compiled shape, padding included
    host_time: float  # scheduling, input building, dispatch
    program: str = ""  # the compiled step, with its bucket
    device_wait: float = (
        0.0  # waiting for results (of the previous step with zero-overhead scheduling)
    )
    duration: float = 0.0
    # the device had nothing to do before this step's dispatch, at most this long (0: it was busy)
    device_idle: float = 0.0
    preempted: int = 0
    waiting: int = 0
    running: int = 0
    cache_usage: float = 0.0

    @classmethod
    def of(
        cls,
        substeps: list[list[SchedulerOutputs]],
        in_flight: InFlight | None,
        start: float,
        now: float,
    ) -> StepRecord:
        outputs = substeps[0]
        prefill = outputs[0].step_type is StepType.PREFILL
        kind = "idle" if in_flight is None else "prefill" if prefill else "decode"
        sequences = sum(len(o.prefill) if prefill else len(o.slots) for o in outputs)
        padded = 0 if in_flight is None else in_flight.key.size * in_flight.key.steps * len(outputs)
        return cls(
            start,
            kind,
            sequences,
            sum(o.num_tokens for step in substeps for o in step),
            padded,
            now - start,
            "" if in_flight is None else str(in_flight.key),
            preempted=sum(len(o.preempted) for step in substeps for o in step),
        )


class EngineStats:
    """Totals, recent step records, histograms and the periodic log line of one engine. Reads host
    clocks, waits for nothing."""

    def __init__(self, engine: StatsSource) -> None:
        self._engine = engine
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.totals = dict.fromkeys(TOTALS, 0)
        self.programs: dict[str, list[int]] = {}  # program -> [steps, rows used, rows of its shape]
        self.finish_reasons: dict[str, int] = {}
        self.ttft, self.inter_token = Histogram(), Histogram()
        self.step_seconds = {kind: Histogram() for kind in STEP_KINDS}
        self.host_seconds = {kind: Histogram() for kind in STEP_KINDS}
        self.device_idle = Histogram()
        self._last_token = np.zeros(
            (len(engine.schedulers), engine.config.max_num_seqs)
        )  # when each slot got its newest token
        self._compiles = compile_watch().unexpected
        steps = environ.get("LOGGING_INTERVAL_STEP", int)
        self._log_every = (
            0
            if engine.args.disable_log_stats or steps <= 0
            else max(1, steps // engine.policy.logging_interval_divisor)
        )
        self._logged = (time.perf_counter(), dict(self.totals))

    @property
    def engine_name(self) -> str:
        return self._engine.name

    # ---- what the engine reports -----------------------------------------------------------------

    def record(self, record: StepRecord) -> None:
        """A step has ended."""
        e, t = self._engine, self.totals
        record.duration = time.perf_counter() - record.start
        record.waiting = sum(s.num_waiting for s in e.schedulers)
        record.running = sum(s.num_running for s in e.schedulers)
        record.cache_usage = max(s.cache_usage for s in e.schedulers)
        self.records.append(record)
        t["preemptions"] += record.preempted
        kind = record.step_type
        if kind in STEP_KINDS:
            t["steps"] += 1
            t[f"{kind}_steps"] += 1
            t["prompt_tokens" if kind == "prefill" else "decode_rows"] += record.tokens
            t[f"padded_{kind}_tokens"] += record.padded_tokens
            used = self.programs.setdefault(record.program, [0, 0, 0])
            for i, n in enumerate((1, record.tokens, record.padded_tokens)):
                used[i] += n
            self.step_seconds[kind].observe(record.duration)
            self.host_seconds[kind].observe(record.host_time)
            if kind == "decode":
                self.device_idle.observe(record.device_idle)
            if self._log_every and t["steps"] % self._log_every == 0:
                self._log(record)

    def admitted(self, rank: int, slots: list[int], now: float) -> None:
        """Sequences got these slots: their next inter-token gap starts here, or at their first
        token if that comes later."""
        self._last_token[rank, slots] = now

    def first_tokens(self, rank: int, slots: list[int], now: float) -> None:
        """A prefill step gave the sequences of these slots (-1: none, PROMPT keeps none) a token
        each."""
        self._last_token[rank, [slot for slot in slots if slot >= 0]] = now
        self.totals["generated_tokens"] += len(slots)

    def next_tokens(self, rank: int, slots: np.ndarray, now: float) -> None:
        """A decode step gave the sequences of these slots a token each; now: seconds of
        time.time()."""
        last = self._last_token[rank]
        self.inter_token.observe_many(now - last[slots])
        last[slots] = now
        self.totals["generated_tokens"] += len(slots)

    def first_token(self, seconds: float) -> None:
        """A request got its first token this long after its arrival."""
        self.ttft.observe(seconds)

    def finished(self, reasons: Iterable[str | None]) -> None:
        """A request is answered; why each of its completions ended."""
        self.totals["requests_finished"] += 1
        for reason in map(str, reasons):
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1

    # ---- what others read ------------------------------------------------------------------------

    @property
    def xla_compiles_after_warm_up(self) -> int:
        """Compilations in this process since this engine was built that no engine was built or
        lazily compiled by."""
        return compile_watch().unexpected - self._compiles

    def padding(self) -> dict[str, dict[str, float]]:
        """Per program: steps, rows used, rows of its shape, and the share of them that
        was padding."""
        return {
            name: {
                "steps": steps,
                "rows": rows,
                "padded_rows": padded,
                "padding": share(rows, padded),
            }
            for name, (steps, rows, padded) in sorted(self.programs.items())
        }

    def summary(self) -> dict[str, Any]:
        """Totals, padding shares, quantiles and the newest records."""
        e, t = self._engine, self.totals
        return {
            "name": e.name,
            "model": e.args.served_model_name,
            "num_blocks": e.runner.num_blocks,
            "compiles_after_warm_up": e.runner.programs.compiles_after_warm_up,
            "xla_compiles_after_warm_up": self.xla_compiles_after_warm_up,
            "warm_up_seconds": e.warm_up_seconds,
            "waiting": sum(s.num_waiting for s in e.schedulers),
            "prompted": sum(s.num_prompted for s in e.schedulers),
            "running": sum(s.num_running for s in e.schedulers),
            "cache_usage": max(s.cache_usage for s in e.schedulers),
            "prefill_padding": share(t["prompt_tokens"], t["padded_prefill_tokens"]),
            "decode_padding": share(t["decode_rows"], t["padded_decode_tokens"]),
            "padding": self.padding(),
            **t,
            "finish_reasons": dict(self.finish_reasons),
            "ttft_seconds": self.ttft.summary(),
            "inter_token_seconds": self.inter_token.summary(),
            "step_seconds": {kind: h.summary() for kind, h in self.step_seconds.items()},
            "host_seconds": {kind: h.summary() for kind, h in self.host_seconds.items()},
            "device_idle_seconds": self.device_idle.summary(),
            **({} if e.prefix_store is None else {"kv_store": e.prefix_store.stats()}),
            **({} if e.experts is None else {"experts": e.experts.report.as_dict()}),
            "last_steps": [asdict(r) for r in list(self.records)[-5:]],
        }

    def _log(self, record: StepRecord) -> None:
        """One line about the steps since the last one."""
        now, e = time.perf_counter(), self._engine
        since, before = self._logged
        self._logged = now, dict(self.totals)
        new = {k: v - before[k] for k, v in self.totals.items()}
        seconds = max(now - since, 1e-9)
        logger.info(
            "%s %s: %d steps (%d prefill, %d decode) in %.2f s, prompt %.0f tok/s, generation %.0f"
            " tok/s, running %d, waiting %d, cache %.1f %%, preempted %d, padding %.1f %% prefill"
            " %.1f %% decode, last step %.2f ms (host %.2f ms, wait %.2f ms)%s",
            e.name,
            e.args.served_model_name,
            new["steps"],
            new["prefill_steps"],
            new["decode_steps"],
            seconds,
            new["prompt_tokens"] / seconds,
            new["generated_tokens"] / seconds,
            record.running,
            record.waiting,
            100 * record.cache_usage,
            new["preemptions"],
            100 * share(new["prompt_tokens"], new["padded_prefill_tokens"]),
            100 * share(new["decode_rows"], new["padded_decode_tokens"]),
            1e3 * record.duration,
            1e3 * record.host_time,
            1e3 * record.device_wait,
            "" if e.experts is None else f", experts: {e.experts.report.line()}",
        )


def share(used: float, padded: float) -> float:
    """The part of `padded` rows that was not used; 0 without rows."""
    return 1 - used / padded if padded else 0.0
