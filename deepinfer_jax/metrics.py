"""What an engine records per step and per request. Host clocks only: no timing adds a device synchronisation."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.scheduler.outputs import SchedulerOutputs, StepType

if TYPE_CHECKING:
    from deepinfer_jax.engine import LLMEngine
    from deepinfer_jax.requests import Request
    from deepinfer_jax.runner import InFlight

logger = logging.getLogger(__name__)

RECORDS_KEPT = 4096


@dataclass(slots=True)
class StepRecord:
    """One engine step. Times are seconds; tokens and sequences are summed over the local ranks."""

    start: float
    step_type: str  # prefill | decode | idle
    sequences: int
    tokens: int
    padded_tokens: int  # rows of the compiled shape, padding included
    host_time: float  # scheduling, input building, dispatch
    device_wait: float = 0.0  # waiting for results (of the previous step with zero-overhead scheduling)
    duration: float = 0.0
    device_idle: float = 0.0  # the device had nothing to do before this step's dispatch, at most this long (0: it was busy)
    preempted: int = 0
    waiting: int = 0
    running: int = 0
    cache_usage: float = 0.0

    @classmethod
    def of(cls, substeps: list[list[SchedulerOutputs]], in_flight: InFlight | None, start: float, now: float) -> StepRecord:
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
            preempted=sum(len(o.preempted) for step in substeps for o in step),
        )


class EngineStats:
    """Totals, recent step records, TTFT and inter-token histograms of one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.totals = {"steps": 0, "prefill_steps": 0, "decode_steps": 0, "prompt_tokens": 0, "generated_tokens": 0, "preemptions": 0}
        self.totals |= {"padded_prefill_tokens": 0, "padded_decode_tokens": 0, "requests_finished": 0}
        self.finish_reasons: dict[str, int] = {}
        self.ttft: deque[float] = deque(maxlen=RECORDS_KEPT)
        self.latencies: deque[float] = deque(maxlen=RECORDS_KEPT)

    def record(self, record: StepRecord) -> None:
        e = self._engine
        record.duration = time.perf_counter() - record.start
        record.waiting = sum(s.num_waiting for s in e.schedulers)
        record.running = sum(s.num_running for s in e.schedulers)
        record.cache_usage = max(s.cache_usage for s in e.schedulers)
        self.records.append(record)
        t = self.totals
        t["steps"] += 1
        t["preemptions"] += record.preempted
        if record.step_type == "prefill":
            t["prefill_steps"] += 1
            t["prompt_tokens"] += record.tokens
            t["padded_prefill_tokens"] += record.padded_tokens
        elif record.step_type == "decode":
            t["decode_steps"] += 1
            t["generated_tokens"] += record.tokens
            t["padded_decode_tokens"] += record.padded_tokens

    def first_token(self, seconds: float) -> None:
        self.ttft.append(seconds)

    def finished(self, request: Request) -> None:
        self.totals["requests_finished"] += 1
        for c in request.completions:
            self.finish_reasons[str(c.finish_reason)] = self.finish_reasons.get(str(c.finish_reason), 0) + 1
        per_token = request.metrics.time_per_output_token
        if per_token is not None:
            self.latencies.append(per_token)

    def summary(self) -> dict[str, Any]:
        """Totals, padding shares, percentiles and the newest records."""
        e, t = self._engine, self.totals
        share = lambda kind, used: 1 - t[used] / t[f"padded_{kind}_tokens"] if t[f"padded_{kind}_tokens"] else 0.0  # noqa: E731
        return {
            "name": e.name,
            "num_blocks": e.runner.num_blocks,
            "compiles_after_warm_up": e.runner.programs.compiles_after_warm_up,
            "warm_up_seconds": e.warm_up_seconds,
            "waiting": sum(s.num_waiting for s in e.schedulers),
            "running": sum(s.num_running for s in e.schedulers),
            "cache_usage": max(s.cache_usage for s in e.schedulers),
            "prefill_padding": share("prefill", "prompt_tokens"),
            "decode_padding": share("decode", "generated_tokens"),
            **t,
            "finish_reasons": dict(self.finish_reasons),
            "ttft_seconds": percentiles(self.ttft),
            "inter_token_seconds": percentiles(self.latencies),
            "last_steps": [asdict(r) for r in list(self.records)[-5:]],
        }

    def close(self) -> None:
        pass


def percentiles(values: Any) -> dict[str, float]:
    """{"p50": ..., "p90": ..., "p99": ..., "count": ...} of a sequence of seconds."""
    if not len(values):
        return {"count": 0}
    p50, p90, p99 = np.percentile(np.fromiter(values, float), (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "count": len(values)}
