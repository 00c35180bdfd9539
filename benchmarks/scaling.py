"""Cost of a step against batch size, context length and number of layers, beside what the machine
allows.

    python benchmarks/scaling.py [--plot scaling.png] [--quick]

Random weights of the demo model's shape (30 layers unless varied). Measured are the engine's own
step programs on prepared inputs, minima over the repeats: decode steps against sequences, decode
steps against keys per sequence, prefill steps against tokens, both against layers, and a decode
step against the number of blocks in the pools, which must not matter. Limits: the bytes a step has
to read (weights, and the keys and values in use) at the measured memory bandwidth, and its
multiply-adds at the measured sgemm rate; the larger one binds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from limits import Limits, load_average, measure

from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.mesh import make_mesh
from deepinfer_jax.runner.model_runner import ModelRunner
from deepinfer_jax.runner.model_source import ModelSource, use_compilation_cache

BLOCK = 16
GROWTH = 64
"""Tokens that a decode point may move on by."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Point:
    """One step: `sequences` of `context` keys each, `rows` rows in all."""

    sequences: int
    context: int
    prefill: bool = False
    layers: int = 30
    num_blocks: int | None = None

    @property
    def room(self) -> int:
        """Tokens a sequence must have room for."""
        return self.context + (0 if self.prefill else GROWTH)

    @property
    def rows(self) -> int:
        return self.sequences * (self.context if self.prefill else 1)

    def bytes_read(self) -> int:
        """Weights once, and every key and value that is attended to (float32)."""
        return (
            4 * (self.body() + self.table())
            + 4 * self.layers * 2 * 3 * 64 * self.sequences * self.context
        )

    def operations(self) -> float:
        """Multiply-adds of matmuls and of attention, times two."""
        pairs = self.sequences * self.context * (self.context / 2 if self.prefill else 1)
        return (
            2 * self.body() * self.rows
            + 2 * self.table() * self.sequences
            + 4 * self.layers * 9 * 64 * pairs
        )

    def body(self) -> int:
        hidden, inner = MODEL["hidden_size"], MODEL["intermediate_size"]
        return self.layers * (hidden * (9 + 2 * 3) * 64 + 9 * 64 * hidden + 3 * hidden * inner)

    def table(self) -> int:
        return MODEL["vocab_size"] * MODEL["hidden_size"]

    def limit(self, limits: Limits) -> float:
        return max(self.bytes_read() / limits.stream, self.operations() / limits.flops)


def make_runner(folder: Path, point: Point) -> ModelRunner:
    """An engine's runner that can hold the point, on random weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": point.layers}))
    pages = -(-point.room // BLOCK)
    args = EngineArgs(
        str(folder),
        load_format="dummy",
        dtype="float32",
        max_model_len=point.room,
        max_num_seqs=point.sequences,
        block_size=BLOCK,
        max_num_batched_tokens=max(point.rows, point.room),
        num_blocks=point.num_blocks or point.sequences * (pages + 1),
        prefill_buckets=None if not point.prefill else (max(point.rows, point.room),),
        decode_buckets=(point.sequences,),
        enable_penalties=False,
        max_logprobs=0,
    )
    source = ModelSource.find(args)
    config = EngineConfig.resolve(args, source.config)
    mesh = make_mesh(config.axes, jax.devices()[:1])
    return ModelRunner(config, source.load(config, mesh), mesh)


def tables(point: Point, pages: int) -> np.ndarray:
    used = -(-point.room // BLOCK)
    out = np.zeros((point.sequences, pages), np.int32)
    out[:, :used] = np.arange(point.sequences * used).reshape(point.sequences, used)
    return out


def step_inputs(runner: ModelRunner, point: Point) -> tuple[ProgramKey, np.ndarray]:
    """The packed input row of the point's step; for a decode step the slots are admitted first."""
    pages = runner.config.max_pages
    if point.prefill:
        key = ProgramKey("prefill", runner.config.prefill_buckets[0])
        layout, rows = runner._rows(key)
        view = {n: layout.view(rows[0], n) for n in layout.fields}
        view["q_starts"][:] = (
            np.minimum(np.arange(len(view["q_starts"])), point.sequences) * point.context
        )
        view["kv_lens"][: point.sequences] = point.context
        view["block_tables"][: point.sequences] = tables(point, pages)
        view["sample_seqs"][: point.sequences] = view["sample_slots"][: point.sequences] = (
            np.arange(point.sequences)
        )
        view["num_samples"][...] = point.sequences
        return key, rows.reshape(-1)
    for at in range(0, point.sequences, 64):
        admit = ProgramKey("admit", 64)
        layout, rows = runner._rows(admit)
        view = {n: layout.view(rows[0], n) for n in layout.fields}
        slots = np.arange(at, min(at + 64, point.sequences))
        view["slots"][:] = point.sequences
        view["slots"][: len(slots)] = slots
        view["num_tokens"][: len(slots)] = point.context
        view["block_tables"][: len(slots)] = tables(point, pages)[slots]
        runner._call(admit, rows.reshape(-1))
    key = ProgramKey("decode", point.sequences)
    layout, rows = runner._rows(key)
    view = {n: layout.view(rows[0], n) for n in layout.fields}
    view["slots"][:] = np.arange(point.sequences)
    view["row_steps"][:] = 1
    view["update_slots"][:] = point.sequences
    return key, rows.reshape(-1)


def measure_points(points: list[Point], repeats: int) -> list[float]:
    """Seconds of each point's step, the least of the repeats; the points take turns, so that the
    machine's load is shared fairly.

    Decode steps move on by a token each, within the block that follows.
    """
    times: list[list[float]] = [[] for _ in points]
    with tempfile.TemporaryDirectory() as scratch:
        runners = [make_runner(Path(scratch) / str(i), p) for i, p in enumerate(points)]
        inputs = [step_inputs(r, p) for r, p in zip(runners, points, strict=True)]
        for repeat in range(-1, repeats):
            for runner, (key, rows), out in zip(runners, inputs, times, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(runner._call(key, rows))
                if repeat >= 0:
                    out.append(time.perf_counter() - start)
        for runner in runners:
            runner.close()
    return [min(t) for t in times]


def sweeps(quick: bool) -> dict[str, tuple[str, list[int], list[Point]]]:
    """name -> (x axis, values, points)."""
    small = 4 if quick else 30
    batch, context = (
        ([1, 4], [64, 256]) if quick else ([1, 2, 4, 8, 16, 32, 64], [128, 512, 2048, 4096])
    )
    tokens, layers = ([64, 128], [1, 2]) if quick else ([32, 128, 512, 2048], [1, 8, 15, 30, 61])
    pool = "blocks in the pools, 4 sequences of 128 keys"
    blocks = [64, 512] if quick else [256, 1024, 4096]
    return {
        "decode, batch": (
            "sequences of 128 keys",
            batch,
            [Point(n, 128, layers=small) for n in batch],
        ),
        "decode, context": (
            "keys per sequence, 4 sequences",
            context,
            [Point(4, n, layers=small) for n in context],
        ),
        "prefill, tokens": (
            "tokens of one prompt",
            tokens,
            [Point(1, n, prefill=True, layers=small) for n in tokens],
        ),
        "decode, layers": (
            "layers, 4 sequences of 128 keys",
            layers,
            [Point(4, 128, layers=n) for n in layers],
        ),
        "prefill, layers": (
            f"layers, {64 if quick else 512} tokens",
            layers,
            [Point(1, 64 if quick else 512, prefill=True, layers=n) for n in layers],
        ),
        "decode, pool size": (
            pool,
            blocks,
            [Point(4, 128, layers=small, num_blocks=n) for n in blocks],
        ),
    }


def plot(
    path: str, results: dict[str, tuple[str, list[int], list[float], list[float], list[float]]]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for ax, (name, (label, xs, seconds, memory, compute)) in zip(
        axes.flat, results.items(), strict=False
    ):
        ax.plot(xs, np.array(seconds) * 1e3, "o-", label="measured")
        ax.plot(xs, np.array(memory) * 1e3, "--", label="limit: bytes read / bandwidth")
        ax.plot(xs, np.array(compute) * 1e3, ":", label="limit: multiply-adds / sgemm rate")
        ax.set(title=name, xlabel=label, ylabel="ms per step", xscale="log", yscale="log")
        ax.set_xticks(xs, map(str, xs))
        ax.xaxis.set_minor_locator(pyplot.NullLocator())
        ax.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", help="write the plots to FILE (needs matplotlib)")
    parser.add_argument(
        "--only", nargs="*", default=(), help="sweeps whose name holds one of these words"
    )
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument(
        "--quick", action="store_true", help="a few small points, to see that it runs"
    )
    args = parser.parse_args()
    use_compilation_cache()
    limits = measure(3 if args.quick else 7)
    print(load_average(), *limits.lines(), sep="\n")
    print(f"{'sweep':18s} {'x':>6s} {'ms':>9s} {'limit ms':>9s} {'of limit':>8s}  binds")
    results = {}
    for name, (label, xs, points) in sweeps(args.quick).items():
        if args.only and not any(word in name for word in args.only):
            continue
        together = "pool" in name  # weights of one size: there is room for all at once
        groups = [points] if together else [[p] for p in points]
        seconds = [s for group in groups for s in measure_points(group, args.repeats)]
        memory = [p.bytes_read() / limits.stream for p in points]
        compute = [p.operations() / limits.flops for p in points]
        results[name] = (label, xs, seconds, memory, compute)
        for x, s, m, c in _rows(xs, seconds, memory, compute):
            limit, binds = max((m, "memory"), (c, "compute"))
            print(
                f"{name:18s} {x:6d} {1e3 * s:9.2f} {1e3 * limit:9.2f} {limit / s:8.0%}  {binds}",
                flush=True,
            )
    if args.plot:
        plot(args.plot, results)


def _rows(*columns: Iterable) -> list[tuple]:
    return list(zip(*columns, strict=True))


if __name__ == "__main__":
    main()
