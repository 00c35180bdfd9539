"""What this machine allows: bytes per second that can be streamed from memory, and float32
multiply-adds per second.

python benchmarks/limits.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.runner import huge_pages

BYTES = 512 << 20
SIZE = 2048


@dataclass(frozen=True)
class Limits:
    """stream: bytes/s read; flops: float32 operations/s of a large matmul (a multiply-add is two).
    Each is the best of the ways."""

    ways: dict[str, float]

    @property
    def stream(self) -> float:
        return max(v for k, v in self.ways.items() if k.startswith("read"))

    @property
    def flops(self) -> float:
        return max(v for k, v in self.ways.items() if k.startswith("sgemm"))

    def lines(self) -> list[str]:
        units = {
            "read": (1e9, "GB/s"),
            "copy": (1e9, "GB/s read + written"),
            "sgemm": (1e9, "GFLOP/s"),
        }
        return [
            f"{name:28s} {value / units[name.split()[0]][0]:8.1f} {units[name.split()[0]][1]}"
            for name, value in self.ways.items()
        ]


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The quickest of `repeats` calls after one that warms up: a limit is what the machine can do
    when left alone."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def measure(repeats: int = 7) -> Limits:
    """A second or two per way. Allocates 1 GiB for a moment."""
    return Limits(stream_ways(repeats) | matmul_ways(repeats))


class Streams:
    """Ways to read 512 MB, to be measured again and again: what a shared machine's memory gives
    changes by the minute."""

    def __init__(self) -> None:
        self.host = np.ones((BYTES // 4 // 4096, 4096), np.float32)
        vector, device = np.ones(4096, np.float32), jnp.copy(self.host)
        huge_pages.collapse([device])  # NumPy asks for large pages by itself
        total, matvec = jax.jit(jnp.sum), jax.jit(lambda m, v: jnp.einsum("nk,k->n", m, v))
        self.ways: dict[str, Callable[[], object]] = {
            "read (XLA sum)": lambda: total(device),
            "read (XLA matrix x vector)": lambda: matvec(device, vector),
            "read (NumPy sum)": self.host.sum,
            "read (NumPy matrix x vector)": lambda: self.host @ vector,
        }

    def rates(self, repeats: int) -> dict[str, float]:
        """Bytes per second of each way, the quickest of `repeats`."""
        return {name: BYTES / seconds(run, repeats) for name, run in self.ways.items()}

    def best(self, repeats: int = 2) -> float:
        """Bytes per second of the best way, now."""
        return max(self.rates(repeats).values())


def stream_ways(repeats: int) -> dict[str, float]:
    streams = Streams()
    target = np.empty_like(streams.host)
    copy = 2 * BYTES / seconds(lambda: np.copyto(target, streams.host), repeats)
    return {**streams.rates(repeats), "copy (NumPy)": copy}


def matmul_ways(repeats: int) -> dict[str, float]:
    a = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32)
    x, product = jnp.asarray(a), jax.jit(jnp.matmul)
    operations = 2 * SIZE**3
    return {
        "sgemm (NumPy)": operations / seconds(lambda: a @ a, repeats),
        "sgemm (XLA)": operations / seconds(lambda: product(x, x), repeats),
    }


def load_average() -> str:
    """The machine's load over the last minute, against its cores: numbers of a busy machine say
    little."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    print(load_average())
    print("\n".join(measure().lines()))
