"""How long the device waits between decode steps, with zero-overhead scheduling on and off, from
the engine's step records.

    python benchmarks/zos.py [--model demo] [--rows 1 16] [--steps 100] [--stream]

`idle` is the time between a step's results being seen and the next step's dispatch, 0 where the
next step was already enqueued: what the device at most had nothing to do. `host` is the host's part
of a step (scheduling, inputs, dispatch). With zero-overhead scheduling the host's work, the
detokenisation of streamed requests included, happens while the device computes. Rounds of both
alternate. On a CPU device host and device share the cores, so idle time saved need not be wall time
saved.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from limits import load_average

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.sampling_params import RequestOutputKind


def make_engine(args: argparse.Namespace, zos: bool) -> LLMEngine:
    most = max(args.rows)
    tokens = max(512, 16 * most)
    sizes = {
        "max_model_len": 512,
        "max_num_seqs": most,
        "max_num_batched_tokens": tokens,
        "num_blocks": 32 * most + 8,
    }
    buckets = {
        "prefill_buckets": tuple(sorted({16 * most, tokens})),
        "decode_buckets": tuple(args.rows),
    }
    return LLMEngine(
        EngineArgs(
            args.model,
            zero_overhead_scheduling=zos,
            warm_up=False,
            disable_log_stats=True,
            **sizes,
            **buckets,
        )
    )


def decode_records(engine: LLMEngine, rows: int, steps: int, stream: bool) -> list:
    """Records of full decode steps of one batch, without the first and last few."""
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    for i in range(rows):
        prompt = np.random.default_rng(i).integers(3, engine.model_config.vocab_size, 16).tolist()
        engine.add_request(
            None,
            prompt,
            SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, output_kind=kind),
        )
    before = engine.stats_log.totals["steps"]
    while engine.has_unfinished_requests():
        engine.step()
    new = list(engine.stats_log.records)[-(engine.stats_log.totals["steps"] - before) :]
    return [r for r in new if r.step_type == "decode" and r.sequences == rows][3:-3]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="requests that stream their text: more work for the host",
    )
    args = parser.parse_args()
    args.rows = sorted(args.rows)
    engines = {"on": make_engine(args, True), "off": make_engine(args, False)}
    print(load_average())
    columns = (
        "rows",
        "ZOS",
        "idle p50 us",
        "idle p99 us",
        "idle share",
        "host p50 us",
        "step p50 ms",
    )
    print("{:>5s} {:4s} {:>12s} {:>12s} {:>10s} {:>12s} {:>12s}".format(*columns))
    for rows in args.rows:
        records: dict[str, list] = {name: [] for name in engines}
        for engine in engines.values():
            decode_records(engine, rows, 12, args.stream)  # compiles
        for _ in range(args.rounds):
            for name, engine in engines.items():
                records[name] += decode_records(engine, rows, args.steps, args.stream)
        for name, rs in records.items():
            idle, host, wall = (
                np.array([getattr(r, f) for r in rs])
                for f in ("device_idle", "host_time", "duration")
            )
            print(
                f"{rows:5d} {name:4s} {1e6 * np.median(idle):12.0f}"
                f" {1e6 * np.quantile(idle, 0.99):12.0f} {idle.sum() / wall.sum():10.2%}"
                f" {1e6 * np.median(host):12.0f} {1e3 * np.median(wall):12.2f}"
            )
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
