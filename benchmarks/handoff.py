"""Hand-over from prompt to completion engines: bytes per second, how much of it hides behind
sampling, latencies of 1P:1D.

    # tables on stdout, handoff.png in DIR
    python benchmarks/handoff.py [--out DIR] [--quick] [--model demo]

1. Bandwidth. Blocks of a pool on one device into a pool on another (gather, copy between devices
   unless they share memory, scatter) against two plain copies of the same bytes, interleaved,
   medians: one NumPy buffer onto another whose pages have been written before ("touched"), which
   the share is of, and `jax.device_put` of one array between the same devices, which takes fresh
   pages from 32 MB on. Gather and scatter alone are printed beside it.
2. Overlap. Time from a request's first token to the acknowledgement of its hand-over, with
   transfers started chunk by chunk before the sampler is waited for (as the prompt engine does),
   and with all of it after the last chunk's sampling.
3. Latencies. One trace of short and long prompts with Poisson arrivals through NORMAL and through
   1P:1D on the same devices' cores: time to first token, gaps between tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
    )

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from deepinfer_jax.disagg.config import DisaggregationConfig
from deepinfer_jax.disagg.deployment import DisaggregatedEngine
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.models.base import PagedCache, ParallelAxes
from deepinfer_jax.runner import kv_pools
from deepinfer_jax.runner.mesh import RankPlacement, make_mesh
from deepinfer_jax.scheduler.routing.ids import AttemptId

# ---- 1. bandwidth --------------------------------------------------------------------------------

CACHES = {
    "MLA, 16 layers, 576 wide": (PagedCache("latent", 16, (1, 576), jnp.float32),),
    "GQA, 16 layers, 8 heads of 64": (
        PagedCache("k", 16, (8, 64), jnp.float32, 0),
        PagedCache("v", 16, (8, 64), jnp.float32, 0),
    ),
}


class Table(dict):
    """The part of StepPrograms that a BlockMover uses; compiles when first asked."""

    num_state_slots = 1

    def register(self, key: Any, lower: Callable[[], Any]) -> None:
        self[key] = functools.cache(lambda: lower().compile())

    def get(self, key: Any) -> Any:
        return self[key]()


def pools(specs: tuple, device: int, num_blocks: int, block_size: int = 16) -> BlockMover:
    axes = ParallelAxes()
    mesh = make_mesh(axes, [jax.devices()[device]])
    caches = kv_pools.allocate(
        kv_pools.abstract_caches(specs, axes, mesh, num_blocks, block_size, 1)
    )
    config = SimpleNamespace(axes=axes, block_size=block_size)
    runner = SimpleNamespace(
        cache_specs=specs,
        caches=caches,
        mesh=mesh,
        config=config,
        num_blocks=num_blocks,
        programs=Table(),
    )
    runner.placement = RankPlacement(mesh, axes)
    return BlockMover(runner)


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def stages(specs: tuple, count: int) -> dict[str, Callable[[], Any]]:
    """What is timed, each over the same number of bytes."""
    devices = jax.devices()
    last = len(devices) - 1
    source, target = pools(specs, 0, 512), pools(specs, last, 512)
    rng = np.random.default_rng(0)
    ids, to = rng.permutation(512)[:count].tolist(), rng.permutation(512)[:count].tolist()
    floats = count * source.block_bytes() // 4
    flat = jax.device_put(np.ones(floats, np.float32), devices[0])
    host, other = np.ones(floats, np.float32), np.zeros(floats, np.float32)
    other.fill(2)  # its pages are there before anything is timed
    ready = source.gather([ids])[0]
    arrived = [target.receive(p, 0) for p in ready]

    def write(payloads: Iterable) -> Any:
        at = 0
        for payload in payloads:
            payload.wait()  # as a completion engine does, which writes what has arrived
            target.scatter([(payload, to[at : at + payload.count])])
            at += payload.count
            del payload
        return target.runner.caches

    return {
        "hand-over": lambda: write(target.receive(p, 0) for _, p in source.gathers([ids])),
        "touched": lambda: np.copyto(other, host),
        "device_put": lambda: jax.device_put(flat, devices[last]),
        "gather": lambda: [p.arrays() for p in source.gather([ids])[0]],
        "scatter": lambda: write(arrived),
    }


@contextlib.contextmanager
def alone(wanted: bool) -> Iterator[None]:
    """Real-time priority for this process's threads, after a pause for everybody else (Linux, as
    root): on a busy machine the threads of XLA's pool would otherwise wait for a core longer than a
    copy takes."""

    def schedule(policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task") if wanted else ():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    time.sleep(0.6 if wanted else 0)
    schedule(os.SCHED_FIFO, 10)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def bandwidth(rounds: int, real_time: bool = False) -> list[dict[str, Any]]:
    """GB/s of every stage, medians over rounds in which all take turns."""
    rows = []
    for name, specs in CACHES.items():
        for count in (16, 64, 256):
            runs = stages(specs, count)
            times: dict[str, list[float]] = {k: [] for k in runs}
            for i in range(0, rounds + 3, 3):
                with alone(real_time):
                    taken = [{key: seconds(run) for key, run in runs.items()} for _ in range(3)]
                for key in runs if i else ():
                    times[key] += [t[key] for t in taken]
            total = count * pools(specs, 0, 1).block_bytes()
            rate = {k: total / statistics.median(v) / 1e9 for k, v in times.items()}
            rows.append(
                {
                    "caches": name,
                    "blocks": count,
                    "MB": total / 1e6,
                    **rate,
                    "share": rate["hand-over"] / rate["touched"],
                }
            )
    return rows


# ---- 2. overlap ----------------------------------------------------------------------------------


class Late(PromptEngine):
    """Moves nothing before the whole prompt is computed and its token sampled."""

    def ready_pages(self, attempt: AttemptId) -> int:
        computed = self.sender.outgoing[attempt].state is not None
        return super().ready_pages(attempt) if computed else 0


def overlap(model: str, rounds: int) -> dict[str, float]:
    """Median seconds from a request's first token to the acknowledgement of its hand-over: what the
    transfer adds for whoever waits for the second token. Prompts of four chunks; transfers started
    early (as the engine does) and late."""
    fields = dict(
        model=model,
        max_model_len=512,
        max_num_seqs=4,
        chunked_prefill=True,
        max_num_batched_tokens=128,
        num_blocks=256,
    )
    fields |= dict(
        prefill_buckets=(128,),
        decode_buckets=(4,),
        warm_up=True,
        enable_penalties=False,
        max_logprobs=0,
    )
    engine = DisaggregatedEngine(fields, DisaggregationConfig())
    source, tokens = engine.prompt_engines[0], {}
    exposed: dict[str, list[float]] = {"early": [], "late": []}
    placement = engine.coordinator
    prefilled, handed_over = placement.prefilled, placement.handed_over

    def note_token(key: AttemptId) -> None:
        tokens[key] = time.perf_counter()
        prefilled(key)

    def note_ack(key: AttemptId, target: str) -> None:
        tokens[key] = time.perf_counter() - tokens[key]
        handed_over(key, target)

    placement.prefilled, placement.handed_over = note_token, note_ack
    prompt = np.random.default_rng(0).integers(10, 400, 400).tolist()
    try:
        for i in range(rounds + 1):
            for how, cls in (("early", PromptEngine), ("late", Late)):
                source.__class__ = cls
                tokens.clear()
                engine.add_request(
                    None,
                    [*prompt, i + 1],
                    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
                )
                while engine.has_unfinished_requests():
                    engine.step()
                engine.wait_idle()
                if i:
                    exposed[how] += tokens.values()
    finally:
        engine.close()
    return {k: statistics.median(v) for k, v in exposed.items()}


# ---- 3. latencies --------------------------------------------------------------------------------


def trace(count: int, rate: float, seed: int = 0) -> list[tuple[float, list[int], int]]:
    """(arrival in seconds, prompt, output tokens): three short prompts for each long one."""
    rng = np.random.default_rng(seed)
    at, out = 0.0, []
    for i in range(count):
        at += rng.exponential(1 / rate)
        length = int(rng.integers(250, 450)) if i % 4 == 3 else int(rng.integers(8, 64))
        out.append((at, rng.integers(10, 400, length).tolist(), int(rng.integers(16, 48))))
    return out


def replay(engine: Any, requests: list[tuple[float, list[int], int]]) -> dict[str, list[float]]:
    """TTFT and gaps between tokens, in seconds, as the caller sees them."""
    start = time.perf_counter()
    arrived: dict[str, float] = {}
    last: dict[str, tuple[float, int]] = {}
    ttft, gaps = [], []

    def feed() -> None:
        for i, (at, prompt, n) in enumerate(requests):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            arrived[f"r{i}"] = time.perf_counter()
            kind = RequestOutputKind.CUMULATIVE
            engine.add_request(
                f"r{i}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, output_kind=kind),
            )

    feeder = threading.Thread(target=feed)
    feeder.start()
    done = 0
    while done < len(requests):
        outputs = engine.step()
        now = time.perf_counter()
        if not outputs:
            time.sleep(0.0005)
        for o in outputs:
            count = len(o.outputs[0].token_ids)
            done += o.finished
            before, had = last.get(o.request_id, (arrived[o.request_id], 0))
            if count > had:
                ttft += [now - before] if not had else []
                gaps += [(now - before) / (count - had)] * (count - had) if had else []
                last[o.request_id] = now, count
    feeder.join()
    return {"ttft": ttft, "gaps": gaps, "total": [time.perf_counter() - start]}


def latencies(model: str, count: int, rate: float) -> dict[str, dict[str, list[float]]]:
    fields = dict(
        model=model, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512, num_blocks=600
    )
    fields |= dict(
        prefill_buckets=(64, 512),
        decode_buckets=(16,),
        warm_up=True,
        enable_penalties=False,
        max_logprobs=0,
    )
    requests = trace(count, rate)
    results = {}
    normal = LLMEngine(EngineArgs(**fields, prefill_attempt_interval=4), devices=jax.devices()[:1])
    replay(normal, requests[:3])
    results["NORMAL"] = replay(normal, requests)
    normal.close()
    apart = DisaggregatedEngine(fields, DisaggregationConfig())
    replay(apart, requests[:3])
    results["1P:1D"] = replay(apart, requests)
    apart.close()
    return results


# ---- report --------------------------------------------------------------------------------------


def plot(
    path: Path, rows: list[dict[str, Any]], results: dict[str, dict[str, list[float]]]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5))
    labels = [f"{r['caches'].split(',')[0]}\n{r['MB']:.0f} MB" for r in rows]
    x = np.arange(len(rows))
    axes[0].bar(x - 0.2, [r["hand-over"] for r in rows], 0.4, label="hand-over")
    axes[0].bar(x + 0.2, [r["touched"] for r in rows], 0.4, label="copy into touched pages")
    axes[0].set_xticks(x, labels, fontsize=8)
    axes[0].set_ylabel("GB/s")
    axes[0].set_title("Bandwidth")
    axes[0].legend()
    for ax, key, title in (
        (axes[1], "ttft", "Time to first token"),
        (axes[2], "gaps", "Gap between tokens"),
    ):
        for name, r in results.items():
            values = np.sort(r[key])
            ax.plot(values * 1e3, np.linspace(0, 100, len(values)), label=name)
        ax.set_xscale("log")
        ax.set_xlabel("ms")
        ax.set_ylabel("% of requests" if key == "ttft" else "% of tokens")
        ax.set_title(title)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def print_bandwidth(rows: list[dict[str, Any]]) -> None:
    print(
        "| caches | blocks | MB | hand-over GB/s | copy into touched pages | share | device_put"
        " | gather | scatter |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        numbers = [f"{r['hand-over']:.2f}", f"{r['touched']:.2f}", f"{r['share']:.0%}"]
        numbers += [f"{r[k]:.1f}" for k in ("device_put", "gather", "scatter")]
        print(f"| {r['caches']} | {r['blocks']} | {r['MB']:.1f} | {' | '.join(numbers)} |")


def print_overlap(t: dict[str, float]) -> None:
    print(
        "\nfirst token to acknowledged hand-over (401 tokens, 4 chunks): transfers started early ",
        end="",
    )
    print(
        f"{t['early'] * 1e3:.1f} ms, after sampling {t['late'] * 1e3:.1f} ms:"
        f" {1 - t['early'] / t['late']:.0%} of it hidden"
    )


def print_latencies(results: dict[str, dict[str, list[float]]]) -> None:
    print(
        "\n| | TTFT p50 ms | p99 | gap p50 ms | p99 | max | trace s"
        " |\n|---|---|---|---|---|---|---|"
    )
    for name, r in results.items():
        a, b = np.percentile(r["ttft"], (50, 99)) * 1e3
        c, d = np.percentile(r["gaps"], (50, 99)) * 1e3
        print(
            f"| {name} | {a:.0f} | {b:.0f} | {c:.1f} | {d:.0f} | {max(r['gaps']) * 1e3:.0f} |"
            f" {r['total'][0]:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for handoff.png")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals per second of the trace")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="bandwidth on a busy machine: bursts of real-time priority (root)",
    )
    parser.add_argument(
        "--part",
        choices=("bandwidth", "overlap", "latencies"),
        action="append",
        help="default: all",
    )
    args = parser.parse_args()
    parts = args.part or ["bandwidth", "overlap", "latencies"]
    rows, results = [], {}
    if "bandwidth" in parts:
        print_bandwidth(rows := bandwidth(5 if args.quick else 21, args.real_time))
    if "overlap" in parts:
        print_overlap(overlap(args.model, 3 if args.quick else 9))
    if "latencies" in parts:
        print_latencies(results := latencies(args.model, 8 if args.quick else 32, args.rate))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        plot(args.out / "handoff.png", rows, results)
        print(f"\n{args.out / 'handoff.png'}")


if __name__ == "__main__":
    main()
