"""The CPU products alone: time, bytes of weights per second and operations per second, compiled
code beside XLA.

    python benchmarks/cpu_matmul.py [--n 49152] [--k 576] [--rows 1 2 4 8 32 128 512] [--repeats \
        15] [--no-xla]

Each figure is the fastest of the repeats, the two sides taking turns. "% of stream" compares the
bytes of the stored weights with what this machine reads from memory (benchmarks/limits.py), which
bounds decode; weights that fit the last-level cache can exceed it.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from limits import measure

from deepinfer_jax.kernels_pallas import matmul
from deepinfer_jax.kernels_pallas.cpu import matmul as cpu_matmul
from deepinfer_jax.kernels_pallas.cpu import native as cpu_native
from deepinfer_jax.models.layers.quant import quant_format


def stored(name: str, n: int, k: int) -> tuple[jax.Array, ...]:
    w = np.random.default_rng(0).standard_normal((n, k), np.float32)
    if name in ("int8", "int4"):
        return tuple(map(jnp.asarray, quant_format(name).quantize(w)))
    return (jnp.asarray(w, cpu_matmul.FORMATS[name]),)


def program(name: str, mode: str, x: jax.Array, parts: tuple[jax.Array, ...]):
    """The layer's product, compiled with DEEPINFER_CPU_NATIVE=mode."""
    os.environ[cpu_native.ENVIRONMENT_VARIABLE] = mode
    return jax.jit(lambda x, *parts: matmul(x, parts)).lower(x, *parts).compile()


def fastest(
    programs: list, x: jax.Array, parts: tuple[jax.Array, ...], repeats: int
) -> list[float]:
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(repeats + 1):
        for run, own in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(x, *parts))
            own.append(time.perf_counter() - start)
    return [min(own[1:]) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=49152)
    parser.add_argument("--k", type=int, default=576)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128, 512])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-xla", action="store_true", help="only the compiled product")
    args = parser.parse_args()
    limits = measure(3)
    print(
        "\n".join(limits.lines()),
        f"\n{cpu_native.status('matmul')}\nload average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    modes = ["native"] if args.no_xla else ["native", "xla"]
    for name in cpu_matmul.FORMATS:
        parts = stored(name, args.n, args.k)
        size = sum(p.nbytes for p in parts)
        for rows in args.rows:
            x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, args.k), np.float32))
            x = x.astype(jnp.bfloat16) if name == "bf16" else x
            seconds = fastest(
                [program(name, mode, x, parts) for mode in modes], x, parts, args.repeats
            )
            figures = [
                f"{mode} {t * 1e3:8.3f} ms {size / t * 1e-9:6.1f} GB/s"
                f" ({100 * size / t / limits.stream:4.0f}% of stream)"
                f" {2e-9 * rows * args.n * args.k / t:6.1f} GFLOP/s"
                for mode, t in zip(modes, seconds, strict=True)
            ]
            print(f"{name:5} rows {rows:4}  {'  |  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
