"""One simulated engine: real schedulers, and a clock instead of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deepinfer_jax.scheduler.group import LocalDPGroup, SchedulerGroup
from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.scheduler.simulation.costs import StepCosts
from deepinfer_jax.scheduler.simulation.deployment import EngineSpec
from deepinfer_jax.scheduler.simulation.recorder import Recorder, row_of
from deepinfer_jax.scheduler.simulation.result import EngineUsage
from deepinfer_jax.scheduler.simulation.traces import Trace

TOKEN, EOS = 0, 1
"""What the simulated model samples: EOS where the trace says the output ends, anything else before.
"""
_NEVER = 2**62
_ATTEMPTS = 3  # a stall is broken by one schedule() and used by the next


@dataclass(slots=True)
class _Step:
    outputs: list[SchedulerOutputs]
    seconds: float


class World(Protocol):
    """What an engine asks of the simulation around it (`simulate.Simulation`)."""

    STEP_END: int
    trace: Trace
    recorder: Recorder
    seed: int
    now: float

    def at(self, time: float, order: int, action: Callable[..., None], *arguments: Any) -> None:
        """Calls `action` at `time`; order breaks ties."""
        ...

    def wake(self, engine: SimEngine) -> None:
        """The engine may have something to schedule."""
        ...

    def room_freed(self) -> None: ...

    def prefill_progress(self, seq: Sequence, tokens: int, seconds: float) -> None: ...

    def hand_over(self, source: SimEngine, rank: Scheduler, seq: Sequence) -> None: ...

    def end(self, seq: Sequence, engine: str) -> None: ...


class SimEngine:
    """Steps as LLMEngine.step() does: schedule, enqueue, then process; with ZOS the step before the
    one just enqueued."""

    def __init__(self, sim: World, name: str, spec: EngineSpec, costs: StepCosts) -> None:
        config = spec.config
        self.sim, self.name, self.spec, self.costs, self.policy = (
            sim,
            name,
            spec,
            costs,
            config.policy,
        )
        self.schedulers = [Scheduler(config, clock=lambda: sim.now) for _ in range(spec.dp)]
        self.group = SchedulerGroup(self.schedulers, LocalDPGroup(spec.dp))
        self.rank_steps = 0
        self.link_free = 0.0  # when the transfers already under way leave this engine's link
        self.wake_pending = False
        self._rng = np.random.default_rng(sim.seed)
        self._depth = 2 if config.zos else 1
        self._in_flight: deque[_Step] = deque()
        self._waits_for_step = (
            False  # scheduled nothing: as in the engine, the step in flight must end first
        )
        self._host_free = self._device_free = 0.0
        self._row_of = [
            np.zeros(config.max_num_seqs, np.int64) for _ in range(spec.dp)
        ]  # request of each slot
        self._end_at = [
            np.zeros(config.max_num_seqs, np.int64) for _ in range(spec.dp)
        ]  # tokens at which it samples EOS
        self._timeline: list[tuple] = []

    # ---- load, as a router sees it

    @property
    def num_seqs(self) -> int:
        """Waiting, prompted and running sequences of all ranks."""
        return sum(s.num_waiting + s.num_prompted + s.num_running for s in self.schedulers)

    def ranks_by_load(self) -> list[int]:
        """Fewest sequences first, then least cache in use, as LLMEngine.least_loaded_rank() orders
        them."""
        loads = [
            (s.num_waiting + s.num_prompted + s.num_running, s.cache_usage, rank)
            for rank, s in enumerate(self.schedulers)
        ]
        return [rank for *_, rank in sorted(loads)]

    # ---- steps

    def add(self, seq: Sequence) -> None:
        self.schedulers[self.ranks_by_load()[0]].add_request(seq)
        self.sim.wake(self)

    def pump(self) -> None:
        """Enqueues as many steps as the engine keeps in flight."""
        attempts = 0
        while len(self._in_flight) < self._depth and not self._waits_for_step:
            if not self.group.has_unfinished() or attempts == _ATTEMPTS:
                break
            outputs = self.group.schedule()
            if all(out.is_empty for out in outputs):
                self._settle(outputs)
                self._waits_for_step = bool(self._in_flight)
                attempts += 1
                continue
            self._enqueue(outputs)
            self._settle(outputs)
        if not self._in_flight:
            self._sample(self.sim.now, 0.0, False, 0)

    def _enqueue(self, outputs: list[SchedulerOutputs]) -> None:
        self._host_free = max(self._host_free, self.sim.now) + self.costs.host_seconds
        start = max(self._host_free, self._device_free)
        seconds = self._seconds(outputs)
        self._device_free = start + seconds
        self._in_flight.append(_Step(outputs, seconds))
        self.rank_steps += len(outputs)
        is_prefill = outputs[0].is_prefill
        for rank, out in enumerate(outputs):
            for seq in out.admitted:
                self._row_of[rank][seq.slot] = row_of(seq)
                self._end_at[rank][seq.slot] = self._tokens_at_end(seq)
            for item in out.prefill:
                self.sim.recorder.scheduled(item.seq, start)
        self._sample(start, seconds, is_prefill, sum(out.num_tokens for out in outputs))
        self.sim.at(self._device_free, self.sim.STEP_END, self.end_step)

    def _tokens_at_end(self, seq: Sequence) -> int:
        length = int(self.sim.trace.output_lengths[row_of(seq)])
        return seq.prompt_len + length if length < seq.max_tokens else _NEVER

    def _seconds(self, outputs: list[SchedulerOutputs]) -> float:
        """The ranks meet in every expert layer, so the slowest one sets the pace."""
        if not outputs[0].is_prefill:
            return max(self._decode_seconds(out) for out in outputs if not out.is_empty)
        return max(self._prefill_seconds(out) for out in outputs if not out.is_empty)

    def _prefill_seconds(self, out: SchedulerOutputs) -> float:
        tokens = sum(item.q_len for item in out.prefill)
        keys = sum(item.q_len * (item.q_start + (item.q_len + 1) / 2) for item in out.prefill)
        return self.costs.prefill_seconds(tokens, keys / tokens)

    def _decode_seconds(self, out: SchedulerOutputs) -> float:
        rows = (
            out.slots.size if not self.spec.config.num_speculative_tokens else int(out.q_lens.sum())
        )
        return self.costs.decode_seconds(rows, int(out.kv_lens.sum()) / out.slots.size)

    def _settle(self, outputs: list[SchedulerOutputs]) -> None:
        """Frees what has ended. A completion engine may then have room for a hand-over
        that waits."""
        freed = False
        for s, out in zip(self.schedulers, outputs, strict=True):
            for seq in out.preempted:
                self.sim.recorder.preemptions[row_of(seq)] += 1
            self._end(out.ignored)
            # Stopped by a preemption, or nothing left to decode; the others ended when their last
            # token was processed.
            self._end([seq for seq in out.finished if not self.sim.recorder.has_ended(row_of(seq))])
            for seq in out.finished:
                s.free_seq(seq)
                freed = True
        if freed:
            self.sim.room_freed()

    def end_step(self) -> None:
        """The oldest step's tokens are there."""
        step = self._in_flight.popleft()
        self._waits_for_step = False
        for rank, out in enumerate(step.outputs):
            if out.is_prefill:
                self._process_prefill(rank, out, step.seconds)
            else:
                self._process_decode(rank, out)
        self.sim.wake(self)

    def _process_prefill(self, rank: int, out: SchedulerOutputs, seconds: float) -> None:
        s, per_token = self.schedulers[rank], seconds / max(1, out.num_tokens)
        ends = [
            item.is_last and item.seq.num_tokens + 1 >= self._tokens_at_end(item.seq)
            for item in out.prefill
        ]
        processed = s.process_outputs(
            out, np.where(ends, EOS, TOKEN).astype(np.int32).reshape(len(ends), 1)
        )
        for item, accepted in zip(out.prefill, processed.num_accepted.tolist(), strict=True):
            if accepted:
                self.sim.recorder.token(row_of(item.seq), self.sim.now)
            if not self.policy.does_decode:
                self.sim.prefill_progress(item.seq, item.q_len, item.q_len * per_token)
                if accepted and not item.seq.is_finished:
                    self.sim.hand_over(self, s, item.seq)
        self._end(processed.finished)

    def _process_decode(self, rank: int, out: SchedulerOutputs) -> None:
        s, slots = self.schedulers[rank], out.slots
        num_speculative_tokens = self.spec.config.num_speculative_tokens
        to_end = (
            self._end_at[rank][slots] - s.slots.num_tokens[slots]
        )  # 1: the next token is the last
        if not num_speculative_tokens:
            processed = s.process_outputs(out, (to_end <= 1).astype(np.int32))
        else:
            tokens = (to_end[:, None] <= np.arange(1, num_speculative_tokens + 2)).astype(np.int32)
            hits = (
                (self._rng.random((slots.size, num_speculative_tokens)) < self.spec.acceptance)
                .cumprod(axis=1)
                .sum(axis=1)
            )
            processed = s.process_outputs(out, tokens, 1 + np.minimum(hits, out.q_lens - 1))
        accepted = processed.num_accepted
        live = accepted > 0
        if not live.all():  # surplus of sequences that had ended
            slots, accepted = slots[live], accepted[live]
        self.sim.recorder.tokens(self._row_of[rank][slots], accepted, self.sim.now)
        self._end(processed.finished)

    def _end(self, finished: list[Sequence]) -> None:
        for seq in finished:
            self.sim.end(seq, self.name)

    # ---- results

    def _sample(self, time: float, seconds: float, is_prefill: bool, tokens: int) -> None:
        running = waiting = 0
        usage = 0.0
        for s in self.schedulers:
            running += s.num_running
            waiting += s.num_waiting + s.num_prompted
            usage += s.cache_usage
        self._timeline.append(
            (time, seconds, is_prefill, tokens, running, waiting, usage / len(self.schedulers))
        )

    def usage(self) -> EngineUsage:
        columns = list(zip(*self._timeline, strict=True)) or [()] * 7
        types = (np.float64, np.float64, bool, np.int64, np.int64, np.int64, np.float64)
        names = ("time", "seconds", "is_prefill", "tokens", "running", "waiting", "cache_usage")
        arrays = {
            name: np.array(column, kind)
            for name, column, kind in zip(names, columns, types, strict=True)
        }
        return EngineUsage(name=self.name, role=self.spec.role, ranks=self.spec.dp, **arrays)
