"""Which P:D split serves a trace within its latency targets on the fewest GPUs.

Every candidate's step times are floors (see floor.py) divided by an efficiency; a closed-form
estimate of capacity ranks the candidates, and the simulator, which drives the engine's real
schedulers, confirms or corrects the best of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.config import EngineArgs
from deepinfer_jax.launch.planner.floor import ModelCosts, StepFloor, step_floor
from deepinfer_jax.launch.planner.gpus import Gpu, find_gpu
from deepinfer_jax.launch.planner.plan import Plan, make_plan
from deepinfer_jax.runner.memory import NotEnoughMemory
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.simulation.deployment import Deployment, EngineSpec, Link
from deepinfer_jax.scheduler.simulation.result import SimulationResult
from deepinfer_jax.scheduler.simulation.simulate import simulate
from deepinfer_jax.scheduler.simulation.traces import Trace

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Targets:
    """Seconds that `share` of the requests must stay under: time to first token, and mean time per
    later token."""

    ttft: float
    itl: float
    share: float = 0.9

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.itl > 0 and 0 < self.share <= 1):
            raise ValueError(f"targets need ttft > 0, itl > 0 and 0 < share <= 1, got {self}")


@dataclass(frozen=True)
class FloorCosts:
    """The simulator's step costs: floors over `efficiency` plus a fixed host and launch time per
    step."""

    model: ModelCosts
    gpu: Gpu
    efficiency: float
    host_seconds: float = 2e-4

    @property
    def kv_bytes_per_token(self) -> float:
        return self.model.kv_bytes_per_token

    def prefill_floor(self, tokens: int, mean_context: float) -> StepFloor:
        sequences = max(1, round(tokens / max(2 * mean_context, 1)))
        return step_floor(
            self.model,
            self.gpu,
            tokens=tokens,
            context=mean_context,
            sequences=sequences,
            decode=False,
        )

    def decode_floor(self, rows: int, mean_context: float) -> StepFloor:
        return step_floor(
            self.model, self.gpu, tokens=rows, context=mean_context, sequences=rows, decode=True
        )

    def prefill_seconds(self, tokens: int, mean_context: float) -> float:
        return self.prefill_floor(tokens, mean_context).seconds / self.efficiency

    def decode_seconds(self, rows: int, mean_context: float) -> float:
        return self.decode_floor(rows, mean_context).seconds / self.efficiency


@dataclass(frozen=True)
class Candidate:
    """A deployment: engines of each role, devices per engine, devices in all."""

    prompt: Plan
    completion: Plan
    prompt_engines: int
    completion_engines: int

    @property
    def devices(self) -> int:
        return (
            self.prompt_engines * self.prompt.devices
            + self.completion_engines * self.completion.devices
        )

    @property
    def name(self) -> str:
        p, d = self.prompt.config.axes, self.completion.config.axes
        return (
            f"{self.prompt_engines}P(dp{p.dp} ep{p.ep}):{self.completion_engines}D(dp{d.dp}"
            f" ep{d.ep})"
        )

    def with_engines(self, prompt: int, completion: int) -> Candidate:
        return dataclasses.replace(self, prompt_engines=prompt, completion_engines=completion)


@dataclass(frozen=True)
class Trial:
    """A candidate, simulated."""

    candidate: Candidate
    result: SimulationResult
    share: float  # of requests within both targets
    ttft: float  # at the targets' share
    itl: float
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        c = self.candidate
        return {
            "deployment": c.name,
            "devices": c.devices,
            "within_targets": self.share,
            "ttft_seconds": self.ttft,
            "itl_seconds": self.itl,
            "passed": self.passed,
            "output_tokens_per_second_per_device": (
                (self.result.summary()["output_tokens_per_second"] or 0.0) / c.devices
            ),
        }


def role_plans(args: EngineArgs, gpu: str, role: EngineType, sizes: Iterable[int]) -> list[Plan]:
    """Plans of one role over every dp = ep in `sizes` that fits (memory by estimate: nothing is
    compiled in a search)."""
    plans = []
    for size in sizes:
        is_completion = not role.policy.does_prefill
        layout = dataclasses.replace(
            args,
            engine_type=role,
            zero_overhead_scheduling=None,
            data_parallel_size=size,
            expert_parallel_size=size,
            stop_preempted_request=is_completion or args.stop_preempted_request,
            prefill_buckets=None,
            decode_buckets=None,
        )
        try:
            plans.append(make_plan(layout, gpu, compile_programs=False))
        except NotEnoughMemory:
            continue
    return plans


def decode_rows(plan: Plan, costs: FloorCosts, context: float, itl: float) -> int:
    """Most sequences per rank that keep a decode step under `itl` seconds and whose KV fits."""
    limit = min(plan.config.max_num_seqs, int(plan.kv_tokens / context))
    if limit < 1 or costs.decode_seconds(1, context) > itl:
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if costs.decode_seconds(middle, context) <= itl else (low, middle - 1)
        )
    return low


def candidates(
    args: EngineArgs,
    gpu: str,
    trace: Trace,
    targets: Targets,
    efficiency: float,
    sizes: Iterable[int] = SIZES,
) -> list[Candidate]:
    """Every pair of layouts with the engine counts that the closed form asks for, fewest devices
    first.

    Decode concurrency is Little's law: rate x outputs x time per token. Prefill is kept at 70 %
    load so that queueing stays within the TTFT target at moderate burstiness (M/D/1: mean wait 1.2
    service times at 0.7).
    """
    target = find_gpu(gpu)
    mean_in, mean_out = float(trace.input_lengths.mean()), float(trace.output_lengths.mean())
    context, rate = mean_in + mean_out / 2, trace.rate
    prompts = []
    for plan in role_plans(args, gpu, EngineType.PROMPT, sizes):
        costs = FloorCosts(plan.costs, target, efficiency)
        tokens = min(plan.config.max_num_batched_tokens, plan.config.prefill_buckets[-1])
        per_engine = (
            plan.config.axes.dp
            * tokens
            / (costs.prefill_seconds(tokens, mean_in / 2) + costs.host_seconds)
        )
        if costs.prefill_seconds(round(mean_in), mean_in / 2) <= targets.ttft:
            prompts.append((plan, math.ceil(rate * mean_in / (0.7 * per_engine))))
    completions = []
    for plan in role_plans(args, gpu, EngineType.COMPLETION, sizes):
        costs = FloorCosts(plan.costs, target, efficiency)
        rows = decode_rows(plan, costs, context, 0.9 * targets.itl)
        if rows:
            seconds = costs.decode_seconds(rows, context)
            completions.append(
                (plan, math.ceil(rate * mean_out * seconds / (rows * plan.config.axes.dp)))
            )
    pairs = [Candidate(p, d, n, m) for (p, n), (d, m) in itertools.product(prompts, completions)]
    return sorted(pairs, key=lambda c: (c.devices, c.completion.devices))


def deployment(c: Candidate, gpu: str, efficiency: float, link: Link | None = None) -> Deployment:
    """The simulator's view of a candidate."""
    target = find_gpu(gpu)
    specs = tuple(
        EngineSpec(
            config=plan.config.scheduler_config(plan.memory.num_blocks),
            count=count,
            dp=plan.config.axes.dp,
            costs=FloorCosts(plan.costs, target, efficiency),
        )
        for plan, count in ((c.prompt, c.prompt_engines), (c.completion, c.completion_engines))
    )
    return Deployment(
        name=c.name,
        engines=specs,
        link=link or Link(bandwidth=target.network_bandwidth * c.prompt.devices),
        reserve=0.5,
    )


def try_out(c: Candidate, gpu: str, trace: Trace, targets: Targets, efficiency: float) -> Trial:
    """Simulates a candidate."""
    plan = c.prompt
    result = simulate(
        trace, deployment(c, gpu, efficiency), FloorCosts(plan.costs, find_gpu(gpu), efficiency)
    )
    share = result.attainment(ttft=targets.ttft, tpot=targets.itl)
    return Trial(
        c,
        result,
        share,
        result.ttft(100 * targets.share),
        result.itl(100 * targets.share),
        share >= targets.share,
    )


def search(
    args: EngineArgs,
    gpu: str,
    trace: Trace,
    targets: Targets,
    *,
    efficiency: float = 0.6,
    sizes: Iterable[int] = SIZES,
    tries: int = 12,
    progress: Callable[[Trial], None] | None = None,
) -> list[Trial]:
    """Simulated trials, the passing ones with the fewest devices first.

    Candidates are tried from the fewest devices up; one that misses a target is tried again with
    one engine more of the role that failed. Stops after `tries` simulations, or when no untried
    candidate can have fewer devices than the best. Raises ValueError if no layout fits or none can
    meet the targets even unloaded.
    """
    queue = candidates(args, gpu, trace, targets, efficiency, sizes)
    if not queue:
        raise ValueError(
            f"no layout of {args.model} on {gpu} with dp = ep in {tuple(sizes)} fits and meets"
            f" ttft={targets.ttft} s and itl={targets.itl} s at efficiency {efficiency}: relax a"
            " target, add sizes, or quantize"
        )
    trials: list[Trial] = []
    while queue and len(trials) < tries:
        best = min((t.candidate.devices for t in trials if t.passed), default=math.inf)
        candidate = queue.pop(0)
        if candidate.devices >= best:
            break
        trial = try_out(candidate, gpu, trace, targets, efficiency)
        trials.append(trial)
        if progress is not None:
            progress(trial)
        if not trial.passed:
            slow_start = trial.ttft > targets.ttft
            more = candidate.with_engines(
                candidate.prompt_engines + slow_start,
                candidate.completion_engines + (not slow_start),
            )
            if all(more.name != c.name for c in (*queue, *(t.candidate for t in trials))):
                queue.append(more)
                queue.sort(key=lambda c: (c.devices, c.completion.devices))
    return sorted(trials, key=lambda t: (not t.passed, t.candidate.devices, t.itl))
