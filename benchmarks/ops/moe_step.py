"""Mixture-of-experts step under expert parallelism: time, and bytes that collectives move, padded
against ideal.

    # sweep tokens, experts and ranks on 8 CPU devices; a table and moe_step.png
    python benchmarks/ops/moe_step.py [--out DIR] [--quick]
    # compile both dispatch paths for 8 H200s (needs jax-cuda13-plugin)
    python benchmarks/ops/moe_step.py --aot

Bytes are read from the compiled program (result sizes of its collectives, less the share a rank
sends to itself); "ideal" counts what this routing needs at least: every (row, other rank that holds
one of its experts) once there and once back. The table's `spare` column is moved / ideal. With a
capacity factor the exchange repeats; `turns` says how often it did.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.dispatch import RAGGED_FLAG, MoeOptions
from deepinfer_jax.models.layers.experts import apply_experts, pairs_per_pass
from deepinfer_jax.models.layers.moe import expert_parallel

COLLECTIVE = re.compile(
    r"= (.*?) (ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter)(-start)?\("
)
SHAPE = re.compile(r"\b([a-z]+\d+\w*)\[([\d,]*)\]")
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
}


@dataclass(frozen=True)
class Case:
    """tokens: rows per rank."""

    ranks: int
    tokens: int
    experts: int
    factor: float | None = None
    top_k: int = 8
    hidden: int = 512
    inner: int = 128

    @property
    def options(self) -> MoeOptions:
        return MoeOptions(capacity_factor=self.factor)


def shape_bytes(text: str) -> int:
    return sum(
        ITEM_BYTES[kind] * int(np.prod([int(d) for d in dims.split(",") if d], initial=1))
        for kind, dims in SHAPE.findall(text)
    )


def collectives(hlo: str) -> list[tuple[str, int]]:
    """(operation, bytes of its result) of every collective in a compiled program, loop
    bodies once."""
    found = []
    for result, op, start in COLLECTIVE.findall(hlo):
        found.append(
            (op, shape_bytes(result[_close(result, 1) :] if start else result))
        )  # "((operands), results)" when asynchronous
    return found


def _close(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i
    raise ValueError(f"unbalanced {text!r}")


def build(case: Case, mesh: Mesh, options: MoeOptions, dtype: jnp.dtype):
    """The jitted MoE exchange with local experts, and its arguments' shapes."""
    axes = ParallelAxes(dp=case.ranks, ep=case.ranks)

    def step(x, ids, weights, gate_up, down):
        def compute(rows, i, w):
            return apply_experts(
                rows, i, w, gate_up, down, per_pass=pairs_per_pass(*i.shape, case.ranks)
            )

        per_rank = case.experts // case.ranks
        return expert_parallel(
            x,
            ids,
            weights,
            compute,
            axes=axes,
            per_rank=per_rank,
            options=options,
            meanwhile=lambda: x,
        )[0]

    dp, over = P(("replica", "ep")), P("ep")
    specs = (dp, dp, dp, over, over)
    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=dp, check_vma=False))
    n, d, i = case.ranks * case.tokens, case.hidden, case.inner
    shapes = (((n, d), dtype), ((n, case.top_k), jnp.int32), ((n, case.top_k), jnp.float32))
    shapes += (((case.experts, 2 * i, d), dtype), ((case.experts, d, i), dtype))
    return program, [
        jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, sp))
        for (s, t), sp in zip(shapes, specs, strict=True)
    ]


def uniform_routing(case: Case, seed: int = 0) -> np.ndarray:
    """i32 [rows, k]: distinct experts, uniformly."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((case.ranks * case.tokens, case.experts)), axis=1)[
        :, : case.top_k
    ].astype(np.int32)


def ideal_bytes(case: Case, ids: np.ndarray, itemsize: int) -> float:
    """Per rank: rows that leave it plus rows that come back, and the slots and weights that travel
    with the former."""
    ranks = ids // (case.experts // case.ranks)
    own = np.repeat(np.arange(case.ranks), case.tokens)
    visits = (ranks[:, :, None] == np.arange(case.ranks)).any(1)
    visits[np.arange(len(own)), own] = False
    return visits.sum() / case.ranks * (2 * case.hidden * itemsize + 8 * case.top_k)


def turns(case: Case, ids: np.ndarray) -> int:
    cap = case.options.capacity(case.tokens, case.top_k, case.ranks)
    to = (ids // (case.experts // case.ranks))[:, :, None] == np.arange(case.ranks)
    queues = to.any(1).reshape(case.ranks, case.tokens, case.ranks).sum(1)
    return int(-(-queues.max() // cap))


def measure(case: Case, repeats: int) -> dict[str, float]:
    mesh = Mesh(np.array(jax.devices()[: case.ranks]).reshape(1, case.ranks), ("replica", "ep"))
    program, shapes = build(case, mesh, case.options, jnp.float32)
    compiled = program.lower(*shapes).compile()
    rng, ids = np.random.default_rng(1), uniform_routing(case)
    values = [
        rng.normal(size=s.shape).astype(np.float32) if s.dtype == jnp.float32 else ids
        for s in shapes
    ]
    args = [jax.device_put(v, s.sharding) for v, s in zip(values, shapes, strict=True)]
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    n = turns(case, ids)
    # of an all-to-all's result, 1 / ranks came from the rank itself; with a cap below the row count
    # the program holds each exchange twice (the first, and the body of the loop), so its text
    # counts two exchanges
    held = 1 if case.options.capacity(case.tokens, case.top_k, case.ranks) >= case.tokens else 2
    moved = (
        sum(b for op, b in collectives(compiled.as_text()) if op == "all-to-all")
        * (1 - 1 / case.ranks)
        / held
        * n
    )
    return {
        "ms": 1e3 * float(np.median(times[2:])),
        "moved": moved,
        "ideal": ideal_bytes(case, ids, 4),
        "turns": n,
    }


def sweep(quick: bool) -> list[Case]:
    base = Case(ranks=8, tokens=128, experts=64)
    tokens = (16, 128) if quick else (16, 64, 128, 256, 512)
    cases = [Case(8, t, base.experts) for t in tokens]
    cases += [Case(8, base.tokens, e) for e in ((16,) if quick else (16, 32, 128))]
    cases += [Case(r, base.tokens, base.experts) for r in ((2,) if quick else (2, 4))]
    few = [Case(8, t, base.experts, top_k=2) for t in tokens[:3]]
    return cases + few + [Case(8, c.tokens, c.experts, factor=1.25, top_k=2) for c in few]


def run(cases: list[Case], repeats: int) -> list[tuple[Case, dict[str, float]]]:
    print("ranks tokens experts top_k factor turns       ms  moved KiB  ideal KiB  spare")
    results = []
    for case in cases:
        m = measure(case, repeats)
        results.append((case, m))
        print(
            f"{case.ranks:>5} {case.tokens:>6} {case.experts:>7} {case.top_k:>5}"
            f" {case.factor or '-':>6} {m['turns']:>5} {m['ms']:>8.2f} {m['moved'] / 1024:>10.0f}"
            f" {m['ideal'] / 1024:>10.0f} {m['moved'] / m['ideal']:>6.2f}"
        )
    return results


def plot(results: list[tuple[Case, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    by_tokens = sorted(
        (c.tokens, m) for c, m in results if c.ranks == 8 and c.experts == 64 and c.top_k == 8
    )
    left.plot([t for t, _ in by_tokens], [m["ms"] for _, m in by_tokens], marker="o")
    left.set(
        xlabel="tokens per rank",
        ylabel="step time (ms)",
        title="8 ranks, 64 experts, top 8",
        xscale="log",
        yscale="log",
    )
    names = [
        f"{c.ranks}r {c.tokens}t {c.experts}e k{c.top_k}{' f' + str(c.factor) if c.factor else ''}"
        for c, _ in results
    ]
    at = np.arange(len(results))
    right.barh(at + 0.2, [m["moved"] / 1024 for _, m in results], 0.4, label="moved")
    right.barh(at - 0.2, [m["ideal"] / 1024 for _, m in results], 0.4, label="ideal")
    right.set_yticks(at, names, fontsize=7)
    right.set(xlabel="KiB per rank and step", title="collective bytes", xscale="log")
    right.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    print("wrote", path)


def aot() -> None:
    """Both paths at DeepSeek-V3's size, compiled for 8 H200s: collectives in the program, their
    bytes, temporary memory."""
    from jax.experimental import topologies

    from deepinfer_jax.kernels_pallas.aot.targets import find_target

    devices = topologies.get_topology_desc(
        "", platform="cuda", target_config=find_target("h200").config(), topology="1x1x8"
    ).devices
    mesh = Mesh(np.array(devices).reshape(1, 8), ("replica", "ep"))
    case = Case(8, 256, 256, hidden=7168, inner=2048)
    print(
        f"XLA_FLAGS {os.environ['XLA_FLAGS']}\npath, temporary MB, collectives (MB of result per"
        " rank)"
    )
    for options in (MoeOptions(), MoeOptions(dispatch="ragged")):
        options.check_backend(RAGGED_FLAG)  # compiling is safe without the flag; running is not
        with jax.default_device(devices[0]):
            program, shapes = build(case, mesh, options, jnp.bfloat16)
            lowered = program.trace(*shapes).lower()
            compiled = lowered.compile()
        asked = sorted(
            set(
                re.findall(
                    r"stablehlo\.(\w+_to_all|all_gather)|(ragged_all_to_all)", lowered.as_text()
                )
            )
        )
        asked = ", ".join(a or b for a, b in asked).replace("_", "-")
        found = ", ".join(
            f"{op} {b / 1e6:.2f}" for op, b in collectives(compiled.as_text()) if b > 1e4
        )
        print(
            f"{options.dispatch} {compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}"
            f" [{asked}] {found}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--aot", action="store_true")
    args = parser.parse_args()
    if args.aot:
        return aot()
    results = run(sweep(args.quick), args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(results, args.out / "moe_step.png")


if __name__ == "__main__":
    main()
