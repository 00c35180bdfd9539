"""Time and cache bytes of a decode step as the context grows: DeepSeek-V3, V3.2 and V4 by turns.

    # on this machine: tiny widths, random weights; writes the plot too
    python benchmarks/long_context.py [--keys 1024 ... 131072] [--plot docs/long_context.png]
    # attention alone, by how many keys are chosen and how many there are
    python benchmarks/long_context.py --chosen
    # cache bytes of the published sizes at 4k, 128k and 1M tokens
    python benchmarks/long_context.py --bytes

One sequence, one row, all keys in pages that hold random numbers. Each point is the median of
--repeats steps, the models taking turns. "read" is what a step reads of the caches, counted from
the models' shapes (`key_costs`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from limits import load_average, median

from deepinfer_jax.kernels_pallas import KeySource, sparse_attention
from deepinfer_jax.models import registry
from deepinfer_jax.models.base import PagedCache, ParallelAxes, StepBatch
from deepinfer_jax.models.loading import load_model
from deepinfer_jax.runner import kv_pools

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
BLOCK = 128
NAMES = {"V3": "deepseek-v3", "V3.2": "deepseek-v3.2", "V4": "deepseek-v4-flash"}
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1 << 20,
    "quantization_config": None,
    "q_lora_rank": 64,
    "num_attention_heads": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
}
MLA = {
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
}
SMALL = {
    "V3": TINY | MLA,
    "V3.2": TINY | MLA | {"index_topk": 512},
    "V4": TINY
    | {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 128, 4, 4],
        "num_hash_layers": 1,
        "head_dim": 160,
        "qk_rope_head_dim": 32,
        "o_groups": 4,
        "o_lora_rank": 16,
        "index_topk": 128,
    },
}


class Decoder:
    """One model with pools of random keys, which decodes one row at any length."""

    def __init__(self, name: str, folder: Path, most_keys: int) -> None:
        hf = json.loads((CONFIGS / NAMES[name] / "config.json").read_text()) | SMALL[name]
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(hf))
        self.name = name
        self.model = load_model(folder / name, dtype="float32", load_format="dummy")
        self.pages = -(-most_keys // BLOCK)
        specs = self.model.model_class.cache_specs(self.model.config, ParallelAxes(), jnp.float32)
        rng = np.random.default_rng(0)
        axes = ParallelAxes()
        self.caches = {
            s.name: tuple(
                jnp.asarray(
                    rng.standard_normal(
                        kv_pools.pool_shape(s, axes, self.pages, BLOCK, 2), np.float32
                    )
                )
                for _ in range(s.layers)
            )
            for s in specs
        }
        self._step = jax.jit(self._run, donate_argnums=1)

    def _run(self, params: Any, caches: Any, batch: StepBatch) -> tuple[jax.Array, Any]:
        module = nnx.merge(self.model.graphdef, params)
        hidden, caches = module(caches, batch)
        return module.compute_logits(hidden), caches

    def seconds(self, keys: int) -> float:
        """Of one step at `keys` keys."""
        batch = self._batch(keys)
        start = time.perf_counter()
        logits, self.caches = self._step(self.model.params, self.caches, batch)
        jax.block_until_ready((logits, self.caches))
        return time.perf_counter() - start

    def _batch(self, keys: int) -> StepBatch:
        table = np.random.default_rng(1).permutation(self.pages).astype(np.int32)[None]
        position = keys - 1
        slot = table[0, position // BLOCK] * BLOCK + position % BLOCK

        def i32(*values: int) -> jax.Array:
            return jnp.asarray(values, jnp.int32)

        return StepBatch(
            i32(7),
            i32(position),
            i32(slot),
            jnp.asarray(table),
            i32(keys),
            i32(0, 1),
            i32(0),
            i32(1),
            is_decode=True,
            block_size=BLOCK,
        )

    def read_bytes(self, keys: int) -> float:
        """What a step reads of the caches."""
        costs = self.model.config.key_costs(4)
        return sum(c.bytes * c.keys(keys) for c in costs)


def measure(decoders: list[Decoder], keys: list[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for count in keys:
        times: dict[str, list[float]] = {d.name: [] for d in decoders}
        for turn in range(repeats + 1):
            for d in decoders:
                took = d.seconds(count)
                if turn:
                    times[d.name].append(took)
        for d in decoders:
            row = {"model": d.name, "keys": count, "ms": 1e3 * median(times[d.name])}
            rows.append(row | {"read_kib": d.read_bytes(count) / 1024})
    return rows


def print_times(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(r["model"] for r in rows))
    print("| keys | " + " | ".join(f"{n} ms | {n} read KiB" for n in names) + " |")
    print("|---" * (1 + 2 * len(names)) + "|")
    for keys in dict.fromkeys(r["keys"] for r in rows):
        cells = [r for r in rows if r["keys"] == keys]
        values = " | ".join(f"{r['ms']:.2f} | {r['read_kib']:,.0f}" for r in cells)
        print(f"| {keys:,} | {values} |")


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, sides = plt.subplots(1, 2, figsize=(10, 4))
    for axis, key, label in zip(sides, ("ms", "read_kib"), ("ms", "KiB of caches"), strict=True):
        for name in dict.fromkeys(r["model"] for r in rows):
            mine = [r for r in rows if r["model"] == name]
            axis.plot([r["keys"] for r in mine], [r[key] for r in mine], "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="keys of the sequence", ylabel=label)
        axis.legend()
    figure.suptitle("A decode step as the context grows (tiny widths, random weights, CPU)")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def attention_seconds(chosen: int, keys: int) -> Callable[[], float]:
    """A function that times one row's attention to `chosen` of `keys` latents, at V3's widths."""
    rng = np.random.default_rng(0)
    heads, dim, v_dim = 16, 576, 512
    pool = jnp.asarray(rng.standard_normal((keys // BLOCK, BLOCK, 1, dim), np.float32))
    q = jnp.asarray(rng.standard_normal((1, heads, dim), np.float32))
    entries = jnp.asarray(rng.permutation(keys)[:chosen][None], jnp.int32)
    table = jnp.asarray(rng.permutation(keys // BLOCK)[None], jnp.int32)
    zero = jnp.zeros(1, jnp.int32)

    @jax.jit
    def attend(q: jax.Array, pool: jax.Array) -> jax.Array:
        source = KeySource(pool, jnp.asarray([chosen]), entries, table, zero)
        return sparse_attention(q, (source,), scale=dim**-0.5, v_dim=v_dim)

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(attend(q, pool))
        return time.perf_counter() - start

    return once


def print_chosen(keys: list[int], repeats: int) -> None:
    """Milliseconds of attention alone: a row per number of chosen keys, a column per context."""
    print("| chosen | " + " | ".join(f"of {n:,} ms" for n in keys) + " |")
    print("|---" * (1 + len(keys)) + "|")
    for chosen in (128, 256, 512, 1024, 2048):
        timers = [attention_seconds(chosen, n) for n in keys]
        turns = [[timer() for timer in timers] for _ in range(repeats + 1)][1:]
        cells = " | ".join(f"{1e3 * median(list(t)):.2f}" for t in zip(*turns, strict=True))
        print(f"| {chosen:,} | {cells} |")


def print_bytes() -> None:
    """Bytes in bfloat16 of the published sizes, with windows in rings and in pages."""
    lengths = {"4k": 4096, "128k": 131072, "1M": 1 << 20}
    print("| | bytes per token | bytes per sequence | " + " | ".join(f"{n} GB" for n in lengths))
    for name in NAMES.values():
        hf = json.loads((CONFIGS / name / "config.json").read_text())
        model = registry.resolve(hf)
        config = model.config_from_hf(hf)
        forms = {"": config}
        if hasattr(config, "reuse_overrides"):
            forms[", in pages"] = dataclasses.replace(config, **config.reuse_overrides())
        for form, c in forms.items():
            specs = model.cache_specs(c, ParallelAxes(), jnp.bfloat16)
            paged = tuple(s for s in specs if isinstance(s, PagedCache))
            token = kv_pools.bytes_per_block(paged, ParallelAxes(), BLOCK) / BLOCK
            state = kv_pools.state_bytes(specs, ParallelAxes(), 1)
            sizes = " | ".join(f"{(token * n + state) / 1e9:.3f}" for n in lengths.values())
            print(f"| {name}{form} | {token:,.0f} | {state:,} | {sizes} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[1 << i for i in range(10, 18)])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--chosen", action="store_true")
    options = parser.parse_args()
    if options.bytes:
        print_bytes()
        return
    if options.chosen:
        print_chosen([4096, 32768, 131072], options.repeats)
        print(f"{load_average()}, jax {jax.__version__}")
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        decoders = [Decoder(n, Path(folder), max(options.keys)) for n in options.models]
        rows = measure(decoders, options.keys, options.repeats)
    print_times(rows)
    print(f"{load_average()}, jax {jax.__version__}")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
