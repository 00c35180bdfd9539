"""Padding of the default buckets on a mixed workload, and how it trades against the number of
programs. Runs no model.

    python benchmarks/padding.py [--requests 2000] [--rate 4 ...] [--max-num-seqs 256] \
        [--max-num-batched-tokens 4096]

The real scheduler runs requests with log-normal prompt and output lengths that arrive at random;
every step is counted against the bucket it would take. Rates are in requests per decode step, from
a trickle to more than the engine can hold; "all at once" queues everything first, as batch
generation does. Padding is the share of rows that hold no token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.config import bucket_sizes
from deepinfer_jax.runner.model_runner import pick
from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.group import LocalDPGroup, SchedulerGroup
from deepinfer_jax.scheduler.outputs import StepType
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence


@dataclass
class Used:
    """Rows of every step of one kind."""

    prefill: list[int]
    decode: list[int]


def run(requests: int, rate: float, max_num_seqs: int, max_tokens: int, seed: int = 0) -> Used:
    """rate: mean arrivals per step; inf: all are there at the start."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(200), 1.0, requests), 4, 2000).astype(int)
    wanted = np.clip(rng.lognormal(np.log(120), 0.8, requests), 1, 1000).astype(int)
    config = SchedulerConfig(
        role=EngineType.NORMAL,
        block_size=16,
        num_blocks=max_num_seqs * 200,
        max_model_len=4096,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        chunked_prefill=True,
        stop_preempted_request=False,
    )
    scheduler = Scheduler(config)
    group, used, added = SchedulerGroup([scheduler], LocalDPGroup(1)), Used([], []), 0
    while added < requests or scheduler.has_unfinished():
        for _ in range(
            requests - added if np.isinf(rate) else min(rng.poisson(rate), requests - added)
        ):
            prompt = np.ones(lengths[added], np.int32)
            scheduler.add_request(
                Sequence(
                    str(added),
                    prompt,
                    max_tokens=int(wanted[added]),
                    stop_token_ids=(),
                    ignore_eos=True,
                )
            )
            added += 1
        (o,) = group.schedule()
        rows = len(o.prefill) if o.step_type is StepType.PREFILL else len(o.slots)
        if rows:
            (used.prefill if o.step_type is StepType.PREFILL else used.decode).append(o.num_tokens)
            scheduler.process_outputs(o, np.full((rows, 1), 5, np.int32), np.ones(rows, np.int32))
        for seq in o.finished:
            scheduler.free_seq(seq)
    return used


def padding(used: list[int], buckets: tuple[int, ...]) -> float:
    return 1 - sum(used) / sum(pick(buckets, n) for n in used) if used else 0.0


def powers(smallest: int, largest: int) -> tuple[int, ...]:
    return (*(smallest << i for i in range(30) if smallest << i < largest), largest)


TABLES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "default": bucket_sizes,
    "powers of two": powers,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, nargs="+", default=[0.05, 0.2, 1.0, float("inf")])
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    args = parser.parse_args()
    runs = {
        rate: run(args.requests, rate, args.max_num_seqs, args.max_num_batched_tokens)
        for rate in args.rate
    }
    columns = (
        "arrivals per step",
        "buckets",
        "programs",
        "prefill steps",
        "padding",
        "decode steps",
        "padding",
    )
    print("{:>18s} {:14s} {:>8s} {:>13s} {:>8s} {:>12s} {:>8s}".format(*columns))
    for rate, used in runs.items():
        for name, make in TABLES.items():
            prefill, decode = make(16, args.max_num_batched_tokens), make(1, args.max_num_seqs)
            when = "all at once" if np.isinf(rate) else f"{rate:g}"
            print(
                f"{when:>18s} {name:14s} {len(prefill) + len(decode):8d} {len(used.prefill):13d}"
                f" {padding(used.prefill, prefill):8.1%} {len(used.decode):12d}"
                f" {padding(used.decode, decode):8.1%}"
            )


if __name__ == "__main__":
    main()
