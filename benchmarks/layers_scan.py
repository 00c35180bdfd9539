"""Layers unrolled in the program, or one layer's program looped over stacked weights (lax.scan):
compile time, step time, memory.

    # on this machine's CPU
    python benchmarks/layers_scan.py [--sizes small demo] [--layers 30 61] [--rows 1 32 --tokens \
        512]
    # memory and program sizes compiled for an H200 (needs jax-cuda13-plugin)
    python benchmarks/layers_scan.py --aot

Both forms run the models' own decoder layer and the same kernels. The scanned one keeps a single
pool [layers * blocks, ...] as the loop's carry and shifts block ids by layer * blocks, so no
layer's pool is ever sliced out or copied; its weights are the scan's xs. Compile times are CPU
seconds of the process, which other load on the machine does not stretch, and wall seconds; step
times are minima and medians over the repeats, forms taking turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from limits import load_average, median

from deepinfer_jax.models.base import StepBatch
from deepinfer_jax.models.layers.linear import WHOLE
from deepinfer_jax.models.layers.rope import rope_cos_sin
from deepinfer_jax.models.llama import DecoderLayer, DenseConfig, Llama

BLOCK, CONTEXT = 16, 256
SIZES = {  # hidden, intermediate, heads, kv heads, head_dim
    "small": (128, 384, 4, 2, 32),
    "demo": (576, 1536, 9, 3, 64),
    "8b": (4096, 14336, 32, 8, 128),
}


@dataclass(frozen=True)
class Shape:
    """A step of `sequences` sequences with `tokens` rows in all; decode if they are equal."""

    sequences: int
    tokens: int

    @property
    def is_decode(self) -> bool:
        return self.sequences == self.tokens

    @property
    def blocks(self) -> int:
        return self.sequences * (CONTEXT // BLOCK)

    def __str__(self) -> str:
        return f"decode[{self.tokens}]" if self.is_decode else f"prefill[{self.tokens}]"


def make_config(size: str, layers: int) -> DenseConfig:
    hidden, inner, heads, kv_heads, head_dim = SIZES[size]
    hf = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
    }
    return Llama.config_from_hf(hf)


def make_batch(shape: Shape) -> StepBatch:
    """Sequences of CONTEXT keys (prefill: of their own rows), each on blocks of its own."""
    pages, each = CONTEXT // BLOCK, shape.tokens // shape.sequences
    keys = CONTEXT if shape.is_decode else each
    tables = np.arange(shape.blocks, dtype=np.int32).reshape(shape.sequences, pages)
    positions = np.tile(np.arange(keys - each, keys, dtype=np.int32), shape.sequences)
    seq_ids = np.repeat(np.arange(shape.sequences, dtype=np.int32), each)
    return StepBatch(
        tokens=np.zeros(shape.tokens, np.int32),
        positions=positions,
        write_slots=(tables[seq_ids, positions // BLOCK] * BLOCK + positions % BLOCK).astype(
            np.int32
        ),
        block_tables=tables,
        kv_lens=np.full(shape.sequences, keys, np.int32),
        q_starts=np.arange(shape.sequences + 1, dtype=np.int32) * each,
        seq_ids=seq_ids,
        state_slots=np.zeros(shape.sequences, np.int32),
        is_decode=shape.is_decode,
    )


def unrolled(graphdef: Any, config: DenseConfig, blocks: int):
    def step(layers, pools, x, batch):
        cos, sin = rope_cos_sin(config.rope, batch.positions)
        keys, values = map(list, pools)
        for i, params in enumerate(layers):
            x, keys[i], values[i] = nnx.merge(graphdef, params)(
                x, cos, sin, keys[i], values[i], batch
            )
        return x, (tuple(keys), tuple(values))

    return step


def scanned(graphdef: Any, config: DenseConfig, blocks: int):
    def step(layers, pools, x, batch):
        cos, sin = rope_cos_sin(config.rope, batch.positions)
        slots, end = blocks * BLOCK, config.num_layers * blocks * BLOCK

        def layer(carry, xs):
            x, keys, values = carry
            index, params = xs
            here = dataclasses.replace(
                batch,
                block_tables=batch.block_tables + index * blocks,
                write_slots=jnp.where(
                    batch.write_slots < slots, batch.write_slots + index * slots, end
                ),
            )
            return nnx.merge(graphdef, params)(x, cos, sin, keys, values, here), None

        (x, *pools), _ = jax.lax.scan(layer, (x, *pools), (jnp.arange(config.num_layers), layers))
        return x, tuple(pools)

    return step


FORMS = {"unrolled": unrolled, "scanned": scanned}


def arguments(form: str, config: DenseConfig, shape: Shape, dtype: Any) -> tuple[Any, tuple]:
    """(graphdef, ShapeDtypeStructs of (layers, pools, x, batch))."""
    layer = nnx.eval_shape(lambda: DecoderLayer(config, 0, axes=WHOLE, dtype=dtype, quant=None))
    graphdef, params = nnx.split(layer)
    n = config.num_layers
    entry = (BLOCK, config.num_kv_heads, config.head_dim)
    if form == "unrolled":
        layers: Any = (params,) * n
        pools: Any = ((jax.ShapeDtypeStruct((shape.blocks, *entry), dtype),) * n,) * 2
    else:
        layers = jax.tree.map(lambda p: jax.ShapeDtypeStruct((n, *p.shape), p.dtype), params)
        pools = (jax.ShapeDtypeStruct((n * shape.blocks, *entry), dtype),) * 2
    x = jax.ShapeDtypeStruct((shape.tokens, config.hidden_size), dtype)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_batch(shape))
    return graphdef, (layers, pools, x, batch)


@dataclass
class Compiled:
    program: Any
    cpu_seconds: float
    wall_seconds: float

    @property
    def temp(self) -> int:
        return self.program.memory_analysis().temp_size_in_bytes

    @property
    def code(self) -> int:
        return self.program.memory_analysis().generated_code_size_in_bytes or len(
            self.program.as_text()
        )


def compile_form(
    form: str, config: DenseConfig, shape: Shape, dtype: Any, sharding: Any = None
) -> tuple[Compiled, tuple]:
    graphdef, args = arguments(form, config, shape, dtype)
    if sharding is not None:
        args = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), args
        )
    step = FORMS[form](graphdef, config, shape.blocks)
    cpu, wall = time.process_time(), time.perf_counter()
    program = jax.jit(step, donate_argnums=(1, 2)).lower(*args).compile()
    return Compiled(program, time.process_time() - cpu, time.perf_counter() - wall), args


def make_arrays(args: tuple, shape: Shape) -> list[Any]:
    """Random weights, small enough that activations stay finite; zero pools."""
    layers, pools, x, _ = args
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32) * 0.02, s.dtype), layers
    )
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pools)
    return [
        weights,
        zeros,
        jnp.ones(x.shape, x.dtype),
        jax.tree.map(jnp.asarray, make_batch(shape)),
    ]


def time_steps(
    programs: dict[str, Any], arrays: dict[str, list[Any]], repeats: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {form: [] for form in programs}
    for repeat in range(repeats + 1):
        for form, program in programs.items():
            state = arrays[form]
            start = time.perf_counter()
            state[2], state[1] = program(*state)
            jax.block_until_ready(state[2])
            if repeat:
                times[form].append(time.perf_counter() - start)
    return times


def row(
    size: str,
    layers: int,
    shape: Shape,
    form: str,
    c: Compiled,
    weights: int,
    pools: int,
    steps: str,
) -> str:
    return (
        f"{size:5s} {layers:6d} {shape!s:13s} {form:9s} {c.cpu_seconds:8.1f} {c.wall_seconds:8.1f}"
        f" {steps:>17s} {c.temp / 2**20:9.2f} {c.temp / pools:8.1%} {weights / 2**20:9.1f}"
        f" {c.code / 2**20:8.2f}"
    )


HEADER = (
    f"{'size':5s} {'layers':>6s} {'step':13s} {'form':9s} {'cpu s':>8s} {'wall s':>8s}"
    f" {'min / median ms':>17s} {'temp MiB':>9s} {'of pools':>8s} {'weights':>9s} {'code':>8s}"
)


def nbytes(tree: Any) -> int:
    return sum(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in jax.tree.leaves(tree))


def measure_cpu(args: argparse.Namespace) -> None:
    print(load_average(), HEADER, sep="\n")
    shapes = [Shape(r, r) for r in args.rows] + [Shape(4, t) for t in args.tokens]
    for size in args.sizes:
        for layers in args.layers:
            config = make_config(size, layers)
            for shape in shapes:
                compiled, arrays = {}, {}
                for form in FORMS:
                    compiled[form], specs = compile_form(form, config, shape, jnp.float32)
                    arrays[form] = make_arrays(specs, shape)
                times = time_steps(
                    {f: c.program for f, c in compiled.items()}, arrays, args.repeats
                )
                for form, c in compiled.items():
                    steps = f"{1e3 * min(times[form]):.2f} / {1e3 * median(times[form]):.2f}"
                    print(
                        row(
                            size,
                            layers,
                            shape,
                            form,
                            c,
                            nbytes(arrays[form][0]),
                            nbytes(arrays[form][1]),
                            steps,
                        ),
                        flush=True,
                    )


def measure_aot(args: argparse.Namespace) -> None:
    """No GPU needed: XLA's memory analysis of the program compiled for one H200, bfloat16."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from deepinfer_jax.kernels_pallas.aot.targets import find_target

    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=find_target("h200").config(), topology="1x1x1"
    )
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("x",)), P())
    print(HEADER)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(topology.devices[0]))
        for layers in args.layers:
            for shape in [Shape(r, r) for r in args.rows] + [Shape(4, t) for t in args.tokens]:
                config = make_config("8b", layers)
                for form in FORMS:
                    c, specs = compile_form(form, config, shape, jnp.bfloat16, sharding)
                    print(
                        row("8b", layers, shape, form, c, nbytes(specs[0]), nbytes(specs[1]), "-"),
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["small", "demo"], choices=SIZES)
    parser.add_argument("--layers", nargs="+", type=int, default=[30, 61])
    parser.add_argument(
        "--rows", nargs="*", type=int, default=[1, 32], help="decode steps of so many sequences"
    )
    parser.add_argument(
        "--tokens",
        nargs="*",
        type=int,
        default=[512],
        help="prefill steps of so many tokens, four sequences",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--aot", action="store_true")
    args = parser.parse_args()
    (measure_aot if args.aot else measure_cpu)(args)


if __name__ == "__main__":
    main()
