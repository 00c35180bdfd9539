"""Time of a decoder's linear layers alone, by weight format and number of rows, on the default
device.

    python benchmarks/ops/quant_linears.py [--layers 8] [--hidden 576] [--intermediate 1536] \
        [--rows 1 4 8 32 128 512]

Prints the fastest and the median of the runs that fit in two seconds, in milliseconds.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels_pallas import matmul
from deepinfer_jax.models.layers.quant import quant_format


def layer_stack():
    """x [M, hidden] through layers of (qkv, out, gate_up, down), with the residual sums between
    them."""

    def run(x, layers):
        for qkv, out, gate_up, down in layers:
            x = x + 0.1 * matmul(matmul(x, qkv)[:, : x.shape[1]], out)
            gate, up = jnp.split(matmul(x, gate_up), 2, axis=1)
            x = x + 0.1 * matmul(jax.nn.silu(gate) * up, down)
        return x

    return jax.jit(run)


def measure(fn, *args, seconds: float = 2.0) -> tuple[float, float]:
    """(fastest, median) milliseconds per call."""
    jax.block_until_ready(fn(*args))
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 128, 512])
    args = parser.parse_args()
    h, i, rng = args.hidden, args.intermediate, np.random.default_rng(0)
    shapes = [(h + h // 3 * 2, h), (h, h), (2 * i, h), (h, i)]
    weights = [
        [(rng.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for s in shapes]
        for _ in range(args.layers)
    ]
    for name in (None, "int8", "int4"):
        store = (lambda w: (w,)) if name is None else quant_format(name).quantize
        layers = [[tuple(map(jnp.asarray, store(w))) for w in layer] for layer in weights]
        fn = layer_stack()
        for rows in args.rows:
            fastest, median = measure(
                fn, jnp.asarray(rng.standard_normal((rows, h)), jnp.float32), layers
            )
            print(
                f"{name or 'float32':8} rows {rows:4}  fastest {fastest:8.2f} ms  median"
                f" {median:8.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
