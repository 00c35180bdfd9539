"""Discrete-event simulation of a deployment over a trace of arrivals, driving the real schedulers
(docs/simulator.md).

    costs = AnalyticCosts()
    trace = synthetic_trace(1000, rate=10, input_mean=1000, output_mean=200)
    result = simulate(trace, parse_deployment("pd:1P:2D", limits_for(trace)), costs)
    print(result.table(), result.ttft(99), result.itl(99))

Only the device is a model: a step takes the seconds its `StepCosts` say. Everything else (queues,
votes, blocks, preemption, prefix reuse, reservations, zero-overhead scheduling) is the engine's own
code.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_jax.scheduler.routing.config import Capacity
from deepinfer_jax.scheduler.routing.ids import AttemptId, PartId
from deepinfer_jax.scheduler.routing.router import Router
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.scheduler.simulation.costs import (
    AnalyticCosts,
    CostsByRole,
    CostTable,
    TableCosts,
    costs_of,
    load_costs,
    save_costs,
)
from deepinfer_jax.scheduler.simulation.deployment import (
    Deployment,
    EngineSpec,
    Link,
    parse_deployment,
)
from deepinfer_jax.scheduler.simulation.engine import EOS, TOKEN, SimEngine
from deepinfer_jax.scheduler.simulation.recorder import Recorder, row_of
from deepinfer_jax.scheduler.simulation.result import SimulationResult, results_table
from deepinfer_jax.scheduler.simulation.traces import Trace, load_trace, make_trace, synthetic_trace

__all__ = [
    "AnalyticCosts",
    "CostTable",
    "Deployment",
    "EngineSpec",
    "Link",
    "SimulationResult",
    "TableCosts",
    "Trace",
    "compare",
    "limits_for",
    "load_costs",
    "load_trace",
    "make_trace",
    "parse_deployment",
    "results_table",
    "save_costs",
    "simulate",
    "synthetic_trace",
]


def simulate(
    trace: Trace, deployment: Deployment, costs: CostsByRole, *, seed: int = 0
) -> SimulationResult:
    """Runs every request of the trace through the deployment and says what happened to it.

    costs: seconds per step of one rank, the same for all engines or by role; an EngineSpec's own
    costs go first. The same arguments give the same result; seed only decides which drafts are
    accepted. Raises ValueError if a role has no costs, RuntimeError if requests can never end.
    """
    return Simulation(trace, deployment, costs, seed).run()


def compare(
    trace: Trace, deployments: Iterable[Deployment], costs: CostsByRole, *, seed: int = 0
) -> list[SimulationResult]:
    """simulate() for each deployment; results_table() prints them side by side."""
    return [simulate(trace, deployment, costs, seed=seed) for deployment in deployments]


def limits_for(trace: Trace, **limits: Any) -> dict[str, Any]:
    """SchedulerConfig fields for parse_deployment(): usual sizes, and a max_model_len that holds
    the trace's longest request."""
    defaults = dict(
        block_size=64,
        num_blocks=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        chunked_prefill=True,
    )
    return {**defaults, "max_model_len": trace.longest, **limits}


@dataclass(slots=True)
class _HandOver:
    """A prefilled request on its way: `source` holds its blocks until they have arrived."""

    source: SimEngine
    source_rank: Scheduler
    sent: Sequence
    received: Sequence
    since: float


class Simulation:
    """The clock, the events and the way of requests between engines. Events of one moment:
    arrivals, deliveries, ends of steps, and then, with all of these known, new steps."""

    ARRIVAL, DELIVERY, STEP_END, WAKE = range(4)

    def __init__(self, trace: Trace, deployment: Deployment, costs: CostsByRole, seed: int) -> None:
        self.trace, self.deployment, self.seed = trace, deployment, seed
        self.now = 0.0
        self.recorder = Recorder(trace)
        self.engines = {
            f"{spec.role.name}_{number}": SimEngine(
                self, f"{spec.role.name}_{number}", spec, spec.costs or costs_of(costs, spec.role)
            )
            for spec in deployment.engines
            for number in range(spec.count)
        }
        self.router = self._router() if deployment.is_split else None
        self._attempts: dict[int, AttemptId] = {}  # by request: what the router calls it
        self._parked: deque[_HandOver] = deque()  # prefilled, no completion engine has room
        self._transfers, self._transfer_seconds = 0, 0.0
        self._events: list[tuple[float, int, int, Callable, tuple]] = []
        self._num_events = 0

    @property
    def _routing(self) -> Router:
        """The router of a deployment whose prefill and decode are apart."""
        assert self.router is not None
        return self.router

    def _router(self) -> Router:
        prompt = [engine for engine in self.engines.values() if engine.policy.does_prefill]
        config = replace(self.deployment.router, expected_output_fraction=self.deployment.reserve)
        if not any(engine.spec.config.enable_prefix_caching for engine in prompt):
            config = replace(config, affinity_block=0)
        capacities = {
            name: _capacity(engine.spec)
            for name, engine in self.engines.items()
            if not engine.policy.does_prefill
        }
        return Router([engine.name for engine in prompt], capacities, config)

    def run(self) -> SimulationResult:
        self._next_arrival(0)
        while self._events:
            self.now, _, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        if self.recorder.num_ended < len(self.trace):
            raise RuntimeError(
                f"deployment {self.deployment.name!r} stalls at {self.now:.3f} s: {self._state()}"
            )
        self.check_integrity()
        gap_seconds, gap_counts = self.recorder.gaps()
        return SimulationResult(
            deployment=self.deployment.name,
            trace=self.trace.name,
            num_ranks=self.deployment.num_ranks,
            seconds=float(self.recorder.finished.max()),
            rank_steps=sum(engine.rank_steps for engine in self.engines.values()),
            requests=self.recorder.table(),
            engines=tuple(engine.usage() for engine in self.engines.values()),
            gap_seconds=gap_seconds,
            gap_counts=gap_counts,
            transfers=self._transfers,
            transfer_seconds=self._transfer_seconds,
        )

    def check_integrity(self) -> None:
        """Nothing is held any more. Raises AssertionError with the state in its message."""
        for engine in self.engines.values():
            for s in engine.schedulers:
                s.check_integrity()
                assert not s.has_unfinished() and not s.blocks.num_used, (
                    f"{engine.name}: {list(s.sequences)}"
                )
        if self.router is not None:
            self.router.check_integrity()
            assert not self.router.jobs, list(self.router.jobs)

    def _state(self) -> str:
        states = []
        for engine in self.engines.values():
            for rank, s in enumerate(engine.schedulers):
                counts = (
                    f"{s.num_waiting} waiting, {s.num_prompted} prompted, {s.num_running} running,"
                    f" {s.cache_usage:.0%} of blocks held"
                )
                states.append(f"{engine.name} rank {rank}: {counts}")
        states.append(f"{len(self._parked)} hand-overs without a completion engine that has room")
        return "; ".join(states)

    # ---- events

    def at(self, time: float, order: int, action: Callable, *arguments: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, order, self._num_events, action, arguments))

    def wake(self, engine: SimEngine) -> None:
        if not engine.wake_pending:
            engine.wake_pending = True
            self.at(self.now, self.WAKE, self._pump, engine)

    def _pump(self, engine: SimEngine) -> None:
        engine.wake_pending = False
        engine.pump()

    def _next_arrival(self, row: int) -> None:
        if row < len(self.trace):
            self.at(float(self.trace.timestamps[row]), self.ARRIVAL, self._arrive, row)

    # ---- the way of a request

    def _arrive(self, row: int) -> None:
        self._next_arrival(row + 1)
        if self.router is None:
            engine = min(self.engines.values(), key=lambda e: e.num_seqs)
            engine.add(self._sequence(row))
            return
        seq = self._sequence(row)
        try:
            self.router.add(PartId(str(row)), seq.prompt_token_ids, self._max_outputs(seq))
        except ValueError:  # larger than any completion engine
            limits = [
                e.spec.config.prompt_limit for e in self.engines.values() if e.policy.does_prefill
            ]
            reason = (
                "prompt_length_exceeded"
                if seq.prompt_len > max(limits)
                else "insufficient_system_resource"
            )
            self.recorder.end(seq, self.now, "router", reason)
            return
        self._dispatch()

    def _sequence(self, row: int) -> Sequence:
        limit, arrival = int(self.trace.max_tokens[row]), float(self.trace.timestamps[row])
        return Sequence(
            row,
            self.trace.prompt(row),
            max_tokens=limit,
            eos_token_ids=(EOS,),
            arrival_time=arrival,
        )

    def _max_outputs(self, seq: Sequence) -> int:
        """Outputs it can have anywhere: max_tokens, unless its length reaches the limit before."""
        longest = max(
            e.spec.config.max_model_len for e in self.engines.values() if e.policy.does_decode
        )
        return max(1, min(seq.max_tokens, longest - seq.prompt_len))

    def _dispatch(self) -> None:
        for assignment in self._routing.dispatch():
            row = int(assignment.part.request)
            self._attempts[row] = assignment.attempt
            self.engines[assignment.prompt_engine].add(self._sequence(row))

    def end(self, seq: Sequence, engine: str, reason: str | None = None) -> None:
        """A request has its result. Raises RuntimeError if it had one before."""
        self.recorder.end(seq, self.now, engine, reason)
        if self.router is not None:
            if self.router.finish(self._attempts.pop(row_of(seq))) is None:
                raise RuntimeError(f"request {seq.request_id}: the router knows no such attempt")
            self._dispatch()

    # ---- hand-over

    def prefill_progress(self, seq: Sequence, tokens: int, seconds: float) -> None:
        self._routing.prefill_progress(self._attempts[row_of(seq)], tokens, seconds)

    def hand_over(self, source: SimEngine, rank: Scheduler, seq: Sequence) -> None:
        """A prompt is done: its blocks stay pinned while it looks for room, then travels."""
        rank.detach(seq)
        self._routing.prefilled(self._attempts[row_of(seq)])
        self._parked.append(_HandOver(source, rank, seq, self._sequence(row_of(seq)), self.now))
        self.room_freed()
        self._dispatch()

    def room_freed(self) -> None:
        """First come, first served: a hand-over never overtakes one that waits for room."""
        while self._parked and self._place(self._parked[0]):
            self._parked.popleft()

    def _place(self, move: _HandOver) -> bool:
        """Reserves slot and blocks where the router says, or where it says next; False if no
        completion engine has room."""
        attempt = self._attempts[row_of(move.sent)]
        refused: list[str] = []
        while (name := self._routing.assign_decode(attempt, exclude=refused)) is not None:
            engine = self.engines[name]
            for rank in engine.ranks_by_load():
                s = engine.schedulers[rank]
                if self._fits(s, move.received) and s.reserve(
                    move.received, self._reservation(s, move.received)
                ):
                    self._send(move, engine, s)
                    return True
            self._routing.release_decode(attempt)
            refused.append(name)
        completions = [e for e in self.engines.values() if not e.policy.does_prefill]
        if any(self._fits(e.schedulers[0], move.received) for e in completions):
            return False
        self.end(
            move.sent, move.source.name, "insufficient_system_resource"
        )  # more than one rank of any engine can hold
        self._release(move)
        return True

    def _fits(self, s: Scheduler, seq: Sequence) -> bool:
        """An empty rank could take it."""
        return (
            seq.prompt_len <= s.config.max_model_len
            and s.config.pages(self._reservation(s, seq)) <= s.config.num_blocks
        )

    def _reservation(self, s: Scheduler, seq: Sequence) -> int:
        """Tokens to hold blocks for: the prompt, one output, and the deployment's share of the
        rest."""
        outputs = max(1, int(seq.max_tokens * self.deployment.reserve))
        return min(seq.prompt_len + outputs, s.max_len_of(seq))

    def _send(self, move: _HandOver, engine: SimEngine, rank: Scheduler) -> None:
        num_bytes = move.sent.prompt_len * move.source.costs.kv_bytes_per_token
        link = self.deployment.link
        start = max(self.now, move.source.link_free, engine.link_free)
        end = start + num_bytes / link.bandwidth
        move.source.link_free = engine.link_free = end
        self.at(end + link.latency, self.DELIVERY, self._deliver, move, engine, rank)

    def _deliver(self, move: _HandOver, engine: SimEngine, rank: Scheduler) -> None:
        self._transfers += 1
        self._transfer_seconds += self.now - move.since
        rank.enqueue_prompted(move.received, [TOKEN])
        self._routing.delivered(self._attempts[row_of(move.sent)])
        self._release(move)
        self.wake(engine)
        self._dispatch()

    def _release(self, move: _HandOver) -> None:
        move.source_rank.release_detached(move.sent)
        self.wake(move.source)


def _capacity(spec: EngineSpec) -> Capacity:
    config = spec.config
    tokens = spec.dp * config.num_blocks * config.block_size
    return Capacity(
        max_requests=spec.dp * config.max_num_seqs, max_tokens=tokens, max_len=config.max_model_len
    )
