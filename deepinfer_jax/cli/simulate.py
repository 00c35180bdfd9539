"""Run a trace of arrivals through one or several deployments, with the real schedulers and a model
of the device only.

No JAX, no GPU, no weights: a step takes the seconds that a cost table, or a roofline of model and
device, says.

  deepinfer-jax simulate --rate 10 --input-mean 1000 --output-mean 200 --deployment normal:3
  pd:1P:2D deepinfer-jax simulate --trace azure.csv --costs costs.json --deployment normal:dp=4
  pd:2P:2D:d.seqs=512 --plot out.png

Deployments: `normal[:ENGINES][:OPTIONS]` or `pd:nP:mD[:OPTIONS]`; options are name=value, separated
by commas: dp, the fields of SchedulerConfig (short forms blocks, tokens, seqs, interval,
any_interval), acceptance, latency, bandwidth, reserve, name; in pd, p.NAME or d.NAME is for one
role. docs/simulator.md explains traces, costs and results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from deepinfer_jax import json_text
from deepinfer_jax.scheduler.simulation.costs import AnalyticCosts, CostsByRole, load_costs
from deepinfer_jax.scheduler.simulation.deployment import parse_deployment
from deepinfer_jax.scheduler.simulation.result import results_table
from deepinfer_jax.scheduler.simulation.simulate import compare, limits_for
from deepinfer_jax.scheduler.simulation.traces import FORMATS, Trace, load_trace, synthetic_trace

_LIMITS = {
    "block_size": "tokens per KV block (64)",
    "num_blocks": "KV blocks per rank (4096)",
    "max_num_seqs": "running sequences per rank (256)",
    "max_num_batched_tokens": "tokens of a prefill step per rank (8192)",
    "max_model_len": "longest sequence (the trace's longest request)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deployment",
        nargs="+",
        required=True,
        metavar="TEXT",
        help="what to run; several are compared",
    )
    _add_trace_flags(parser.add_argument_group("arrivals"))
    _add_cost_flags(
        parser.add_argument_group(
            "step costs: --costs, or a roofline (default: an 8B model on an H100)"
        )
    )
    limits = parser.add_argument_group("limits of a rank, where a deployment says nothing")
    for name, text in _LIMITS.items():
        limits.add_argument(_flag(name), type=int, help=text)
    limits.add_argument(
        "--prefix-caching",
        action="store_true",
        help="reuse the KV of shared prefixes (the trace says what is shared)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="print a JSON list, one object per deployment, instead of the table",
    )
    output.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw TTFT, inter-token latency and a timeline (needs matplotlib)",
    )


def _add_trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", metavar="FILE", help="a trace file; without it arrivals are drawn at random"
    )
    group.add_argument("--trace-format", default="auto", choices=("auto", *FORMATS))
    group.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="only the first N requests (random: N requests, default 1000)",
    )
    group.add_argument(
        "--speed", type=float, default=1.0, help="arrivals come this many times as fast"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        help="what every request asks for; outputs then end by EOS, unforeseen",
    )
    group.add_argument("--rate", type=float, help="random: requests per second")
    group.add_argument("--input-mean", type=float, help="random: mean prompt length in tokens")
    group.add_argument("--output-mean", type=float, help="random: mean output length in tokens")
    group.add_argument(
        "--input-cv",
        type=float,
        default=1.0,
        help="random: standard deviation / mean of the prompt length (1)",
    )
    group.add_argument(
        "--output-cv", type=float, default=1.0, help="random: the same of the output length (1)"
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        choices=("poisson", "gamma", "constant"),
        help="random: kind of gaps",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=2.0,
        help="gamma: standard deviation / mean of the gaps (2; 1 is Poisson)",
    )
    group.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="random: leading prompt tokens common to a group",
    )
    group.add_argument(
        "--prefix-groups",
        type=int,
        default=1,
        metavar="N",
        help="random: number of such groups (1)",
    )
    group.add_argument("--seed", type=int, default=0)


def _add_cost_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--costs", metavar="FILE", help="JSON table of step costs")
    for field in fields(AnalyticCosts):
        default = field.default if field.default is not None else "all parameters"
        shown = f"{default:.4g}" if isinstance(default, float) else default
        group.add_argument(_flag(field.name), type=float, help=f"roofline ({shown})")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        from deepinfer_jax.cli.simulate_plot import (
            draw,  # before the work: matplotlib may be missing
        )
    costs = _costs(args)
    trace = _trace(args)
    limits = {name: getattr(args, name) for name in _LIMITS if getattr(args, name) is not None}
    limits = limits_for(trace, **limits, enable_prefix_caching=args.prefix_caching)
    deployments = [parse_deployment(text, limits) for text in args.deployment]
    results = compare(trace, deployments, costs, seed=args.seed)
    if args.json:
        print(json_text.dumps([result.summary() for result in results], indent=1))
    else:
        print(
            f"trace  {trace.name}: {len(trace)} requests, {trace.rate:.4g}/s, mean"
            f" {trace.input_lengths.mean():.0f} tokens in, ",
            end="",
        )
        print(
            f"{trace.output_lengths.mean():.0f} out\ncosts "
            f" {args.costs or _roofline_text(costs)}\n\n{results_table(results)}"
        )
    if args.plot:
        draw(results, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0


def _costs(args: argparse.Namespace) -> CostsByRole:
    given = {
        field.name: getattr(args, field.name)
        for field in fields(AnalyticCosts)
        if getattr(args, field.name) is not None
    }
    if args.costs is None:
        return AnalyticCosts(**given)
    if given:
        raise ValueError(
            f"--costs says what steps cost; {', '.join(map(_flag, given))} would have no effect"
        )
    return load_costs(args.costs)


def _roofline_text(costs: AnalyticCosts) -> str:
    compute = f"{costs.peak_flops / 1e12:.4g} TFLOP/s x {costs.compute_efficiency}"
    memory = f"{costs.bandwidth / 1e12:.4g} TB/s x {costs.memory_efficiency}"
    return f"roofline of {costs.parameters / 1e9:.4g}e9 parameters, {compute}, {memory}"


def _trace(args: argparse.Namespace) -> Trace:
    random = ("rate", "input_mean", "output_mean")
    given = [_flag(name) for name in random if getattr(args, name) is not None]
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be >= 1, got {args.limit}")
    if args.trace is not None:
        if given:
            raise ValueError(
                f"--trace says what arrives; {', '.join(given)} would have no effect (--speed"
                " changes the rate)"
            )
        trace = load_trace(args.trace, args.trace_format, args.limit)
    else:
        if len(given) < len(random):
            raise ValueError("give --trace FILE, or all of --rate, --input-mean and --output-mean")
        names = (
            "input_cv",
            "output_cv",
            "arrivals",
            "burstiness",
            "shared_prefix",
            "prefix_groups",
            "seed",
        )
        trace = synthetic_trace(
            args.limit or 1000, **{name: getattr(args, name) for name in (*random, *names)}
        )
    trace = trace if args.speed == 1.0 else trace.faster(args.speed)
    return trace if args.max_tokens is None else trace.asking_for(args.max_tokens)
