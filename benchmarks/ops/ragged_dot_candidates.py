"""Which existing grouped matmul would serve MoE on GPUs? Each candidate is compiled, ahead of time,
for the shapes the models need.

  JAX_PLATFORMS=cpu python benchmarks/ops/ragged_dot_candidates.py [--target B200] [--only tokamax]

Needs what `python -m deepinfer_jax.kernels_pallas.aot` needs. tokamax is not a dependency: put it
into an environment of its own (`pip install tokamax==0.0.17`); absent, its rows are skipped.
Nothing runs on a GPU and no speed is claimed. Weights are passed as the engine keeps them, `[E, N,
K]`: what a candidate transposes first shows up as temporary memory the size of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import glob
import importlib
import os
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.kernels_pallas import dispatch
from deepinfer_jax.kernels_pallas.aot.check import Report, gpu_target, read_dump
from deepinfer_jax.kernels_pallas.aot.targets import find_target
from deepinfer_jax.kernels_pallas.grouped_matmul import grouped_matmul

_JAX = "jax.experimental.pallas.ops.gpu"
BF16, FP8, I32, F32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """rows `[M, K]` sorted by expert times `[E, N, K]`; fp8: e4m3 weights with a scale per 128 x
    128 block."""

    model: str
    experts: int
    n: int
    k: int
    rows: int
    fp8: bool = False

    @property
    def label(self) -> str:
        return f"{self.model}, {self.rows} rows, {'e4m3 blocks' if self.fp8 else 'bf16'}"

    @property
    def weight_bytes(self) -> int:
        return self.experts * self.n * self.k * (1 if self.fp8 else 2)

    def args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        e, n, k = self.experts, self.n, self.k
        args = [((self.rows, k), BF16), ((e, n, k), FP8 if self.fp8 else BF16), ((e,), I32)]
        return tuple(
            jax.ShapeDtypeStruct(*a)
            for a in args + ([((e, n // 128, k // 128), F32)] if self.fp8 else [])
        )


PROBLEMS = (
    Problem("Qwen3-30B-A3B 128 x 768 x 2048", 128, 768, 2048, 512),
    Problem("Qwen3-30B-A3B 128 x 768 x 2048", 128, 768, 2048, 32768),
    Problem("DeepSeek-V3 32 x 2048 x 7168", 32, 2048, 7168, 512),
    Problem("DeepSeek-V3 32 x 2048 x 7168", 32, 2048, 7168, 32768),
    Problem("DeepSeek-V3 32 x 2048 x 7168", 32, 2048, 7168, 512, fp8=True),
)


def ours(x, w, sizes, scale=None):
    return grouped_matmul(x, w, sizes, w_scale=scale)


def lax_ragged_dot(x, w, sizes, scale=None):
    if scale is not None:
        raise NotImplementedError("no block scales")
    return jax.lax.ragged_dot(x, w.mT, sizes)


def jax_hopper(x, w, sizes, scale=None):
    """jax.experimental.pallas.ops.gpu.ragged_dot_mgpu (wgmma). Scales: none, so e4m3 is tried as it
    is."""
    module = importlib.import_module(f"{_JAX}.ragged_dot_mgpu")
    tiles = {
        "block_m": 64,
        "block_n": 128,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 1,
    }
    return module.ragged_dot(x, w, group_sizes=sizes, transpose_rhs=True, **tiles)


def jax_blackwell(x, w, sizes, scale=None, *, collective: bool):
    """jax.experimental.pallas.ops.gpu.blackwell_ragged_dot_mgpu (tcgen05); takes `[E,
    K, N]` only."""
    module, matmul = (
        importlib.import_module(f"{_JAX}.blackwell_ragged_dot_mgpu"),
        importlib.import_module(f"{_JAX}.blackwell_matmul_mgpu"),
    )
    config = module.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        collective=collective,
        grid_tile_width=1,
        grid_minor_dim=matmul.MatmulDimension.M,
    )
    # it asks the process's first device, here a CPU, for its number of multiprocessors
    with unittest.mock.patch.object(
        jax, "local_devices", lambda: [unittest.mock.Mock(core_count=148)]
    ):
        return module.ragged_dot_kernel(x, w.mT, sizes, config)


def tokamax(x, w, sizes, scale=None):
    """tokamax.ragged_dot, Mosaic, its own choice of tiles. Scales: one per column and 128 of K, the
    finest it takes."""
    module = importlib.import_module("tokamax")
    if scale is not None:
        qwix = importlib.import_module("qwix")
        w = qwix.QArray(
            qvalue=w.mT, scale=jnp.repeat(scale, 128, axis=1).mT.astype(BF16), qtype=FP8
        )
        return module.ragged_dot(x, w, sizes, implementation="mosaic", preferred_element_type=BF16)
    return module.ragged_dot(x, w.mT, sizes, implementation="mosaic")


CANDIDATES: dict[str, tuple[Callable, str]] = {  # name -> (function, module it needs)
    "this project": (ours, "jax"),
    "lax.ragged_dot": (lax_ragged_dot, "jax"),
    "jax ragged_dot_mgpu": (jax_hopper, f"{_JAX}.ragged_dot_mgpu"),
    "jax blackwell_ragged_dot_mgpu": (
        functools.partial(jax_blackwell, collective=False),
        f"{_JAX}.blackwell_ragged_dot_mgpu",
    ),
    "jax blackwell_ragged_dot_mgpu, collective": (
        functools.partial(jax_blackwell, collective=True),
        f"{_JAX}.blackwell_ragged_dot_mgpu",
    ),
    "tokamax": (tokamax, "tokamax"),
}


TARGETS = ("h200", "b200")


def installed(module: str) -> bool:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
        return True
    return False


def compile_one(fn: Callable, problem: Problem, target: str, dump: str) -> Report:
    report = Report(target, "grouped_matmul", problem.label)
    with gpu_target(find_target(target)) as mesh:
        sharding = NamedSharding(mesh, PartitionSpec())
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in problem.args()]
        dispatch.reset_explain()
        compiled = jax.jit(fn, out_shardings=sharding).trace(*args).lower().compile()
    report.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    if os.listdir(dump):
        read_dump(report, dump, find_target(target))
    return report


def reason(error: Exception) -> str:
    """The line of an error that says most: ptxas's, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return next(
        (line for line in lines if "cannot be compiled" in line or "rror" in line.split(":")[0]),
        lines[0],
    )[:220].replace("|", "/")


def rows(target: str, only: str | None) -> Iterator[str]:
    dump = os.environ.setdefault("MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp(prefix="mosaic-"))
    for name, (fn, module) in CANDIDATES.items():
        if only and only not in name:
            continue
        if not installed(module):
            print(f"{name}: {module} is not installed, skipped", file=sys.stderr)
            continue
        if "collective" in name and target != "b200":
            print(
                f"{name}: not tried on {target}, where compiling it ends the process",
                file=sys.stderr,
            )
            continue
        for problem in PROBLEMS:
            for path in glob.glob(f"{dump}/*"):
                os.remove(path)
            left = f"| {name} | {target} | {problem.label} |"
            try:
                r = compile_one(fn, problem, target, dump)
            except Exception as error:  # a refusal is a result
                yield f"{left} refused: {reason(error)} | | | |"
                continue
            used = (
                f"{r.registers} / {r.spill_bytes} | {r.shared_bytes} | {r.matrix}"
                if r.registers
                else "XLA only | |"
            )
            yield (
                f"{left} {used} | {r.temp_bytes / 1e6:.1f} MB ="
                f" {r.temp_bytes / problem.weight_bytes:.2f} x weights |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, help="default: each in turn")
    parser.add_argument("--only", help="candidates whose name contains this")
    options = parser.parse_args()
    if (
        options.target is None
    ):  # a process each: tokamax compiled for one kind of GPU fails for the next
        only = ["--only", options.only] if options.only else []
        for target in TARGETS:
            subprocess.run([sys.executable, __file__, "--target", target, *only], check=True)
        return
    print(
        "| candidate | GPU | product | registers / spilled bytes | shared memory, bytes |"
        " tensor-core instructions | temporary memory |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in rows(options.target, options.only):
        print(row, flush=True)


if __name__ == "__main__":
    main()
