"""Prefill of latent attention: absorbed against expanded, one layer, on this machine's CPU or GPU.

    python benchmarks/ops/mla_prefill.py [--heads 16] [--repeats 5]

Every row is one step of `rows` tokens per sequence, the last ones of `keys`. `rule` is what "auto"
picks (MLAConfig.expands). Decision: docs/decisions/030-mla-prefill.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.models.base import StepBatch
from deepinfer_jax.models.layers.mla import MLAConfig, MLAttention
from deepinfer_jax.models.layers.rope import RopeConfig, rope_cos_sin

HIDDEN, BLOCK = 512, 64
SHAPES = (
    *((1, rows, 1024) for rows in (32, 64, 128, 256, 512, 1024)),
    *((4, rows, 256) for rows in (32, 64, 128, 256)),
    (1, 64, 64),
    (16, 64, 64),
)


def batch_of(sequences: int, rows: int, keys: int) -> StepBatch:
    pages = keys // BLOCK
    tables = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    positions = np.tile(np.arange(keys - rows, keys, dtype=np.int32), sequences)
    ids = np.repeat(np.arange(sequences, dtype=np.int32), rows)
    slots = tables[ids, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = np.arange(sequences + 1, dtype=np.int32) * rows
    zeros = np.zeros(sequences, np.int32)
    lens = np.full(sequences, keys, np.int32)
    return jax.tree.map(
        jnp.asarray,
        StepBatch(np.zeros_like(positions), positions, slots, tables, lens, starts, ids, zeros),
    )


def build(config: MLAConfig, dtype: jnp.dtype):
    """(params, jitted layer): random weights on the default device."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MLAttention(HIDDEN, config, dtype=dtype)))
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s.shape) / np.sqrt(s.shape[-1]), s.dtype), state
    )

    def step(state, x, pool, batch):
        cos, sin = rope_cos_sin(config.rope, batch.positions)
        return nnx.merge(graphdef, state)(x, cos, sin, pool, batch)

    return state, jax.jit(step, donate_argnums=2)


def milliseconds(
    config: MLAConfig, shape: tuple[int, int, int], dtype: jnp.dtype, repeats: int
) -> float:
    sequences, rows, keys = shape
    batch = batch_of(sequences, rows, keys)
    state, step = build(config, dtype)
    x = jnp.ones((sequences * rows, HIDDEN), dtype)
    pool = jnp.ones((sequences * keys // BLOCK, BLOCK, 1, config.entry_dim), dtype)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        y, pool = step(state, x, pool, batch)
        y.block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    config = MLAConfig(args.heads, None, 512, 128, 64, 128, RopeConfig(64))
    print(f"{jax.devices()[0].device_kind}, {args.heads} heads, {jnp.dtype(dtype).name}")
    print(
        f"{'sequences':>9} {'rows':>5} {'keys':>5} {'absorbed ms':>12} {'expanded ms':>12}"
        f" {'rule':>9}"
    )
    for sequences, rows, keys in SHAPES:
        ms = [
            milliseconds(
                dataclasses.replace(config, prefill=f), (sequences, rows, keys), dtype, args.repeats
            )
            for f in ("absorbed", "expanded")
        ]
        rule = "expanded" if config.expands(sequences * rows, sequences, keys) else "absorbed"
        print(f"{sequences:>9} {rows:>5} {keys:>5} {ms[0]:>12.1f} {ms[1]:>12.1f} {rule:>9}")


if __name__ == "__main__":
    main()
