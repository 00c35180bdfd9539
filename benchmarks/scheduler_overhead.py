"""Host cost of scheduling: a steady decode step (schedule + process_outputs), and a prefill step
that admits 256 sequences.

    python benchmarks/scheduler_overhead.py [--out DIR] [--drafts N]

Prints a table against the limits to hold (100 us at 256 running sequences, 500 us at 4096) and
writes DIR/scheduler_overhead.png (default: out/). CPU time of the scheduling thread, per step, so
that other load on the machine does not count; steps in which sequences take new blocks are part of
the run. Python's garbage collector runs as it does in an engine, over the heap that an engine has.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import deepinfer_jax.llm  # noqa: F401  (an engine's modules: objects the collector walks over)
from deepinfer_jax.scheduler import Scheduler, SchedulerConfig, Sequence

RUNNING = (64, 256, 1024, 4096)
LIMITS_US = {256: 100.0, 4096: 500.0}
PROMPT = 32


def make_scheduler(running: int, num_speculative_tokens: int, zos: bool) -> Scheduler:
    config = SchedulerConfig(
        block_size=64,
        num_blocks=running * 64,
        max_model_len=4096,
        max_num_batched_tokens=running * (PROMPT + 8),
        max_num_seqs=running,
        chunked_prefill=True,
        num_speculative_tokens=num_speculative_tokens,
        zos=zos,
        prefill_attempt_interval=10**9,
        prefill_any_attempt_interval=10**9,
    )
    return Scheduler(config)


def add(s: Scheduler, count: int) -> None:
    for i in range(count):  # uneven lengths: block growth is spread over the steps as in service
        s.add_request(
            Sequence(i, np.arange(1, PROMPT + i % 8), max_tokens=4000, eos_token_ids=(0,))
        )


def decode_costs(running: int, num_speculative_tokens: int, zos: bool, steps: int) -> np.ndarray:
    """Microseconds of each of `steps` decode steps with `running` sequences."""
    s = make_scheduler(running, num_speculative_tokens, zos)
    add(s, running)
    tokens = np.full((running, 1 + num_speculative_tokens), 7, np.int32)
    counts = np.full(running, 1 + num_speculative_tokens // 2, np.int32)
    pending = s.schedule()
    if not zos:
        s.process_outputs(pending, tokens[:, :1])
    costs = np.empty(steps)
    for i in range(steps):
        start = time.thread_time()
        out = s.schedule_decode()
        done = pending if zos else out
        s.process_outputs(done, tokens[:, :1] if done.is_prefill else tokens, counts)
        costs[i] = time.thread_time() - start
        pending = out
    assert s.num_running == running
    return costs * 1e6


def prefill_costs(admitted: int, repeats: int) -> np.ndarray:
    """Microseconds of a prefill step that admits `admitted` sequences and of committing their first
    tokens."""
    costs = []
    for _ in range(repeats):
        s = make_scheduler(admitted, 0, False)
        add(s, admitted)
        start = time.thread_time()
        out = s.schedule()
        s.process_outputs(out, np.full(admitted, 7, np.int32))
        costs.append(time.thread_time() - start)
        assert s.num_running == admitted
    return np.array(costs) * 1e6


def plot(path: Path, rows: list[tuple[int, float, float]], prefill: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts, medians, p99 = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.loglog(counts, medians, "o-", label="median decode step")
    axes.loglog(counts, p99, "o:", label="99th percentile")
    axes.loglog(
        counts,
        [medians[0] * n / counts[0] for n in counts],
        "--",
        color="grey",
        label="linear growth",
    )
    axes.loglog(list(LIMITS_US), list(LIMITS_US.values()), "v", color="red", label="limit to hold")
    axes.set(
        xlabel="running sequences",
        ylabel="host time per step (us)",
        title=f"Scheduler overhead (prefill admitting 256: {prefill:.0f} us)",
    )
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--zos", action="store_true", help="schedule a step ahead of the results")
    arguments = parser.parse_args()
    decode_costs(64, arguments.drafts, arguments.zos, 50)
    rows = []
    for running in RUNNING:
        costs = decode_costs(running, arguments.drafts, arguments.zos, arguments.steps)
        rows.append((running, float(np.median(costs)), float(np.percentile(costs, 99))))
        limit = LIMITS_US.get(running)
        verdict = (
            ""
            if limit is None
            else f"  limit {limit:.0f}: {'held' if rows[-1][1] <= limit else 'MISSED'}"
        )
        _, median, p99 = rows[-1]
        print(
            f"decode, {running:5d} running: median {median:7.1f} us, p99 {p99:7.1f} us,"
            f" {median / running:6.3f} us each{verdict}"
        )
    prefill = float(np.median(prefill_costs(256, 20)))
    print(f"prefill admitting 256: median {prefill:.0f} us, {prefill / 256:.2f} us each")
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(arguments.out / "scheduler_overhead.png", rows, prefill)
    print(f"plot: {arguments.out / 'scheduler_overhead.png'}")


if __name__ == "__main__":
    main()
