"""Say what a deployment needs, before owning a GPU.

  deepinfer-jax plan --model DIR --gpu h200 --role completion --dp 8 --ep 8 --quantization fp8
  deepinfer-jax plan --model DIR --gpu h200 --search --rate 50 --input-mean 2000 --output-mean 400
  --ttft 2 --itl 0.05

The first form compiles the role's own step functions for the GPU (JAX's CUDA plugin, no device) and
prints bytes per device, KV blocks, collectives and the least time of each step; without the plugin
it says what is missing, and --estimate uses a formula for the temporaries instead. The second
simulates P:D splits and prints the one with the fewest GPUs that meets the targets. DIR needs
config.json only. `plan --experts FILE` shows what an engine has counted and where it placed its
experts. docs/capacity.md explains the numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepinfer_jax import json_text
from deepinfer_jax.config import EngineArgs
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.launch.planner import experts
from deepinfer_jax.launch.planner.gpus import GPUS, find_gpu
from deepinfer_jax.launch.planner.plan import Plan, make_plan
from deepinfer_jax.launch.planner.search import SIZES, Targets, Trial, search
from deepinfer_jax.scheduler.simulation.traces import Trace, load_trace, synthetic_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="a folder with config.json")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"{', '.join(GPUS)}, or cpu for this machine's devices",
    )
    parser.add_argument("--role", default="normal", help="normal, prompt or completion (normal)")
    parser.add_argument(
        "--devices", type=int, help="GPUs of the job; must equal dp x tp (default: that)"
    )
    parser.add_argument("--dp", type=int, help="attention ranks (default: ep)")
    parser.add_argument("--ep", type=int, help="ranks the experts are spread over (1)")
    parser.add_argument(
        "--tp", type=int, default=1, help="devices a rank's matrices are split over (1)"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="int8, int4 or fp8")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--device-memory-bytes", type=int, help="instead of the GPU's own (needed with --gpu cpu)"
    )
    parser.add_argument(
        "--context",
        type=float,
        default=2048,
        help="keys per row assumed for the step floors (2048)",
    )
    parser.add_argument(
        "--estimate", action="store_true", help="compile nothing: temporaries by formula"
    )
    parser.add_argument(
        "--experts",
        metavar="FILE",
        help="an expert placement: alone, shown as a table (--plot: and as heat maps), for --ep"
        " ranks if given; with --model, its loads make the floors' ranks uneven",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the plan (or the trials) as JSON; - for standard output only",
    )
    find = parser.add_argument_group("search for a P:D split")
    find.add_argument("--search", action="store_true")
    find.add_argument(
        "--trace",
        metavar="FILE",
        help="a trace file (see simulate); without it arrivals are drawn at random",
    )
    find.add_argument("--limit", type=int, default=2000, help="requests simulated (2000)")
    find.add_argument("--rate", type=float, help="random: requests per second")
    find.add_argument("--input-mean", type=float, default=2000)
    find.add_argument("--output-mean", type=float, default=400)
    find.add_argument("--ttft", type=float, default=2.0, help="target, seconds (2)")
    find.add_argument("--itl", type=float, default=0.05, help="target, seconds per token (0.05)")
    find.add_argument(
        "--share", type=float, default=0.9, help="of requests that must meet both targets (0.9)"
    )
    find.add_argument(
        "--efficiency", type=float, default=0.6, help="floor / real step time assumed (0.6)"
    )
    find.add_argument(
        "--sizes",
        type=_sizes,
        default=SIZES,
        help=f"dp = ep to try per role ({','.join(map(str, SIZES))})",
    )
    find.add_argument("--tries", type=int, default=12, help="simulations at most (12)")
    find.add_argument(
        "--plot",
        metavar="FILE.png",
        help="GPUs against latency of every trial, or heat maps of --experts (needs matplotlib)",
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def engine_args(args: argparse.Namespace) -> EngineArgs:
    ep = args.ep or 1
    dp = args.dp or ep
    if args.devices is not None and args.devices != dp * args.tp:
        raise ValueError(f"--devices {args.devices} must equal dp x tp = {dp} x {args.tp}")
    if args.gpu == "cpu" and args.device_memory_bytes is None:
        raise ValueError("--gpu cpu needs --device-memory-bytes: how large a device to plan for")
    return EngineArgs(
        args.model,
        engine_type=args.role,
        dtype=args.dtype,
        quantization=args.quantization,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        chunked_prefill=True,
        gpu_memory_utilization=args.gpu_memory_utilization,
        device_memory_bytes=args.device_memory_bytes,
        data_parallel_size=dp,
        expert_parallel_size=ep,
        expert_placement=args.experts,
        tensor_parallel_size=args.tp,
    )


def run(args: argparse.Namespace) -> int:
    if args.experts is not None and args.model is None:
        return _show_experts(args)
    missing = [f"--{name}" for name in ("model", "gpu") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"plan needs {' and '.join(missing)}, or --experts FILE alone")
    if args.gpu != "cpu":
        find_gpu(args.gpu)
    return _search(args) if args.search else _plan(args)


def _show_experts(args: argparse.Namespace) -> int:
    shown = experts.view(PlacementRecord.load(args.experts), args.ep)
    print(experts.table(shown))
    if args.plot:
        experts.draw(shown, args.plot)
    return 0


def _plan(args: argparse.Namespace) -> int:
    plan = make_plan(
        engine_args(args), args.gpu, context=args.context, compile_programs=not args.estimate
    )
    if args.json != "-":
        print(table(plan))
    _write(args.json, plan.as_dict())
    return 0


def table(plan: Plan) -> str:
    """The plan as text."""
    m, axes = plan.memory, plan.config.axes
    gb = lambda x: f"{x / 1e9:10.2f} GB"  # noqa: E731
    layout = f"{plan.devices} x {plan.gpu} (dp {axes.dp}, ep {axes.ep}, tp {axes.tp})"
    source = "ESTIMATED, nothing was compiled" if plan.estimated else "from the compiled program"
    unused = " (more could never be in use)" if m.num_blocks == m.useful_blocks else ""
    tokens = (
        f"{m.num_blocks} blocks of {plan.config.block_size} tokens = {plan.kv_tokens} tokens per"
        f" rank{unused}"
    )
    lines = [
        f"{Path(plan.args.model).name} as {plan.config.role.name} on {layout}",
        f"largest program     {m.program}, temporaries {source}",
        f"device              {gb(m.device_bytes)} x {m.utilization}",
        f"weights             {gb(m.params_bytes)}",
        f"temporaries         {gb(m.temp_bytes)}",
        f"decode state        {gb(m.decode_state_bytes + m.state_cache_bytes)}",
        f"KV blocks           {gb(m.cache_bytes)} = {tokens}",
    ]
    if plan.costs.imbalance != 1:
        lines.append(f"experts             max / mean of ranks {plan.costs.imbalance:.3f}")
    for op, entry in plan.collectives.items():
        lines.append(
            f"{op:<19} {entry['count']} per step, {entry['bytes'] / 1e6:.1f} MB per device (of"
            f" {m.program})"
        )
    lines += [
        "",
        (
            f"{'step':>10} {'floor ms':>9} {'compute':>9} {'memory':>9} {'exchange':>9}  binds    "
            " tokens/s per device"
        ),
    ]
    buckets = len(plan.config.prefill_buckets)
    for i, f in enumerate(plan.floors):
        kind = "prefill" if i < buckets else "decode"
        rate = f.tokens / f.seconds / axes.tp
        parts = " ".join(
            f"{1e3 * s:9.3f}"
            for s in (f.seconds, f.compute_seconds, f.memory_seconds, f.exchange_seconds)
        )
        lines.append(f"{kind:>7}{f.tokens:>6} {parts}  {f.binds:<9} {rate:,.0f}")
    return "\n".join(lines)


def _search(args: argparse.Namespace) -> int:
    trace = _trace(args)
    targets = Targets(args.ttft, args.itl, args.share)
    quiet = args.json == "-"
    trials = search(
        engine_args(args),
        args.gpu,
        trace,
        targets,
        efficiency=args.efficiency,
        sizes=args.sizes,
        tries=args.tries,
        progress=None if quiet else lambda t: print(trial_line(t), flush=True),
    )
    best = trials[0]
    if not quiet:
        verdict = (
            f"fewest GPUs: {best.candidate.devices} ({best.candidate.name})"
            if best.passed
            else "no trial met the targets; raise --tries"
        )
        print(verdict)
    _write(args.json, [t.as_dict() for t in trials])
    if args.plot:
        draw(trials, targets, args.plot)
    return 0 if best.passed else 1


def trial_line(t: Trial) -> str:
    c = t.candidate
    return (
        f"{c.devices:5d} GPUs  {c.name:<34} TTFT {t.ttft:7.3f} s  ITL {1e3 * t.itl:7.2f} ms "
        f" {100 * t.share:5.1f} % within targets  " + ("ok" if t.passed else "missed")
    )


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace:
        return load_trace(args.trace, limit=args.limit)
    if args.rate is None:
        raise ValueError("--search needs --trace or --rate")
    return synthetic_trace(
        args.limit,
        rate=args.rate,
        input_mean=args.input_mean,
        output_mean=args.output_mean,
        max_length=args.max_model_len // 2,
    )


def draw(trials: Sequence[Trial], targets: Targets, path: str) -> None:
    """GPUs against both latencies, the targets and the Pareto front drawn in."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'deepinfer-jax[plot]'") from None
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for ax, name, target in zip(axes, ("ttft", "itl"), (targets.ttft, targets.itl), strict=True):
        points = sorted((t.candidate.devices, getattr(t, name)) for t in trials)
        for t in trials:
            ax.scatter(
                t.candidate.devices, getattr(t, name), color="tab:green" if t.passed else "tab:red"
            )
            ax.annotate(t.candidate.name, (t.candidate.devices, getattr(t, name)), fontsize=6)
        front = [p for i, p in enumerate(points) if all(q[1] > p[1] for q in points[:i])]
        ax.plot(*zip(*front, strict=True), color="tab:blue", linewidth=1, label="Pareto front")
        ax.axhline(target, color="black", linestyle="--", label="target")
        ax.set(xlabel="GPUs", ylabel=f"{name.upper()} at the targets' share, s", yscale="log")
        ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _write(path: str | None, value: object) -> None:
    if path is None:
        return
    text = json_text.dumps(value, indent=1)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")
