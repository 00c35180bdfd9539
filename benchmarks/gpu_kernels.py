"""Check the kernels of kernels_pallas on a GPU, then time each against its floor and against the
XLA path. Under 5 minutes.

    python benchmarks/gpu_kernels.py [--only mla] [--json out.json]
    # small shapes, correctness only: tests this script, times nothing
    JAX_PLATFORMS=cpu python benchmarks/gpu_kernels.py --smoke

1. Correctness: fresh random inputs (--seed), with NaN in everything a kernel must not read, against
   a float64 NumPy oracle.
2. Two limits measured on this device: copy bandwidth (bytes read plus written) and bf16 matmul
   rate.
3. Per case: milliseconds of the chosen implementation, of the XLA path, and the floor: the larger
   of bytes over the bandwidth and operations over the rate. Each time is the median of several runs
   of a loop on the device, so dispatch is not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import dispatch, testing
from deepinfer_jax.kernels_pallas.testing import AttentionCase, GroupedCase

OPS = {
    name: getattr(kernels, name)
    for name in ("paged_decode", "ragged_prefill", "grouped_matmul", "moe_experts", "kv_write")
}
# weights first: the timing loop carries the first argument, and XLA would widen weights that no
# round changes once for all rounds
OPS["matmul"] = lambda w, x, scale, **options: kernels.matmul(x, (w, scale), **options)
BF16 = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
FP8 = {"dtype": "bfloat16", "cache_dtype": "float8_e4m3fn"}
LENS = (1, 16, 17, 0, 64, 65, 300, 511)

# ---- correctness ---------------------------------------------------------------------------------

_GQA128, _GQA64 = (
    {"heads": 8, "kv_heads": 2, "d": 128, "block_size": 16},
    {"heads": 8, "kv_heads": 2, "d": 64, "block_size": 32},
)
_MLA = {"heads": 16, "kv_heads": 1, "d": 576, "v_dim": 512, "block_size": 64}
_ONE, _TWO, _MANY, _FEW = (
    (1,) * 8,
    (2,) * 8,
    (1, 16, 3, 0, 64, 60, 7, 500),
    (1, 2, 3, 0, 4, 5, 6, 7),
)
ATTENTION_CHECKS = [
    (op, f"{name} {label}", AttentionCase(LENS, q_lens, **shape, **dtypes))
    for label, dtypes in (("bf16", BF16), ("e4m3", FP8))
    for op, name, q_lens, shape in (
        ("paged_decode", "gqa", _ONE, _GQA128),
        (
            "paged_decode",
            "gqa rows window sinks",
            _TWO,
            {**_GQA64, "sliding_window": 50, "sinks": True},
        ),
        ("paged_decode", "mla", _ONE, _MLA),
        ("ragged_prefill", "gqa", _MANY, {**_GQA128, "pad_rows": 5}),
        ("ragged_prefill", "window sinks", _MANY, {**_GQA64, "sliding_window": 40, "sinks": True}),
        (
            "ragged_prefill",
            "mla expanded",
            _MANY,
            {"heads": 2, "kv_heads": 2, "d": 192, "dv": 128, "block_size": 16},
        ),
        ("ragged_prefill", "mla absorbed", _FEW, _MLA),
    )
]
GROUPED_CHECKS = {
    "decode bf16": GroupedCase(
        (3, 0, 17, 1), n=512, k=512, dtype="bfloat16", w_dtype="bfloat16", pad=7
    ),
    "prefill bf16": GroupedCase(
        (130, 0, 257, 1), n=512, k=512, dtype="bfloat16", w_dtype="bfloat16", pad=7
    ),
    "decode e4m3": GroupedCase(
        (3, 0, 17, 1), n=512, k=512, dtype="bfloat16", w_dtype="float8_e4m3fn", scale="block", pad=7
    ),
    "prefill e4m3": GroupedCase(
        (130, 0, 257, 1),
        n=512,
        k=512,
        dtype="bfloat16",
        w_dtype="float8_e4m3fn",
        scale="block",
        pad=7,
    ),
}


def check_attention(op: str, case: AttentionCase, seed: int) -> float:
    inputs = testing.attention_inputs(case, seed)
    expected = testing.attention_oracle(case, inputs)
    kwargs = {"scale": case.scale, "v_dim": case.v_dim, "sliding_window": case.sliding_window}
    if op == "paged_decode":
        kwargs["q_per_seq"] = case.q_lens[0]
        del inputs["q_starts"], inputs["seq_ids"]
    got = jax.jit(functools.partial(OPS[op], **kwargs))(**inputs)
    return float(np.max(np.abs(np.asarray(got.astype(jnp.float32)) - expected)))


def check_grouped(op: str, case: GroupedCase, seed: int) -> float:
    make, oracle = {
        "grouped_matmul": (testing.grouped_inputs, testing.grouped_oracle),
        "moe_experts": (testing.experts_inputs, testing.experts_oracle),
    }[op]
    inputs = make(case, seed)
    got = jax.jit(functools.partial(OPS[op]))(
        **inputs
    )  # a new function: traced, so its choice is recorded
    return float(np.max(np.abs(np.asarray(got.astype(jnp.float32)) - oracle(**inputs))))


def check_dense(seed: int) -> float:
    inputs = testing.grouped_inputs(
        dataclasses.replace(GROUPED_CHECKS["prefill e4m3"], sizes=(77,), pad=0), seed
    )
    got = jax.jit(functools.partial(OPS["matmul"]))(
        inputs["w"][0], inputs["x"], inputs["w_scale"][0]
    )
    return float(
        np.max(np.abs(np.asarray(got.astype(jnp.float32)) - testing.grouped_oracle(**inputs)))
    )


def check_all(seed: int, only: str | None) -> list[dict]:
    jobs = [
        (op, name, functools.partial(check_attention, op, case))
        for op, name, case in ATTENTION_CHECKS
    ]
    jobs += [
        (op, name, functools.partial(check_grouped, op, c))
        for op in ("grouped_matmul", "moe_experts")
        for name, c in GROUPED_CHECKS.items()
    ]
    jobs.append(("matmul", "e4m3 77 rows", check_dense))
    rows = []
    for op, name, job in jobs:
        if only and only not in f"{op} {name}":
            continue
        dispatch.reset_explain()
        error = job(seed)
        chosen = next(c.name for c in dispatch.choices() if c.op == op)
        rows.append(
            {
                "op": op,
                "name": name,
                "implementation": chosen,
                "max_error": error,
                "ok": error < 0.04,
            }
        )  # NaN is not ok
        print(
            f"{op:15} {name:28} {chosen:11} max error {error:.4f} "
            f" {'ok' if rows[-1]['ok'] else 'WRONG'}",
            flush=True,
        )
    return rows


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One timed call: `op(*args, **kwargs)`; bytes it must move and floating-point operations it
    must do."""

    op: str
    name: str
    args: tuple
    kwargs: dict
    bytes: float
    flops: float


def nbytes(*arrays) -> float:
    return float(sum(a.size * a.dtype.itemsize for a in arrays if a is not None))


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    return jax.jit(
        lambda: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)
    )()


def attention_work(
    op: str,
    name: str,
    *,
    sequences: int,
    rows: int,
    keys: int,
    heads: int,
    kv_heads: int,
    d: int,
    dv: int | None = None,
    v_dim: int | None = None,
    block: int = 16,
    dtype=jnp.bfloat16,
) -> Work:
    """`sequences` sequences of `keys` keys, the last `rows` of which are queries."""
    pages = -(-keys // block)
    tables = jnp.asarray(
        np.random.default_rng(0).permutation(sequences * pages).reshape(sequences, pages), jnp.int32
    )
    k = normal(1, (sequences * pages, block, kv_heads, d), dtype)
    v = None if v_dim else normal(2, (sequences * pages, block, kv_heads, dv or d), dtype)
    q, lens = normal(3, (sequences * rows, heads, d)), jnp.full(sequences, keys, jnp.int32)
    args, kwargs = (q, k, v, tables, lens), {"scale": d**-0.5, "v_dim": v_dim}
    if op == "ragged_prefill":
        args += (
            jnp.arange(sequences + 1, dtype=jnp.int32) * rows,
            jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), rows),
        )
    else:
        kwargs["q_per_seq"] = rows
    width = v_dim or dv or d
    pairs = sequences * (rows * (keys - rows) + rows * (rows + 1) / 2)
    moved = nbytes(q, k, v) + q.size // d * width * 2
    return Work(op, name, args, kwargs, moved, 2 * pairs * heads * (d + width))


def experts_work(name: str, *, rows: int, experts: int, k: int, n: int, fp8: bool = False) -> Work:
    sizes = (
        np.random.default_rng(0).multinomial(rows, np.full(experts, 1 / experts)).astype(np.int32)
    )
    dtype = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
    gate_up, down = normal(1, (experts, 2 * n, k), dtype), normal(2, (experts, k, n), dtype)
    scales = None
    if fp8:
        scales = (
            jnp.full((experts, -(-2 * n // 128), -(-k // 128)), 0.02),
            jnp.full((experts, -(-k // 128), -(-n // 128)), 0.02),
        )
    x, live = normal(3, (rows, k)), float((sizes > 0).mean())
    moved = live * nbytes(gate_up, down) + 2 * nbytes(x)
    return Work(
        "moe_experts",
        name,
        (x, gate_up, down, jnp.asarray(sizes)),
        {"scales": scales},
        moved,
        6.0 * rows * k * n,
    )


def dense_work(name: str, *, rows: int, n: int, k: int) -> Work:
    w, scale, x = (
        normal(1, (n, k), jnp.float8_e4m3fn),
        jnp.full((n // 128, k // 128), 0.02),
        normal(3, (rows, k)),
    )
    return Work(
        "matmul",
        name,
        (w, x, scale),
        {},
        nbytes(w, x) + rows * n * 2,
        2.0 * rows * n * k,
    )


def write_work(name: str, *, rows: int, blocks: int, dtype) -> Work:
    pool, x = normal(1, (blocks, 16, 8, 128), dtype), normal(2, (rows, 8, 128))
    slots = jnp.asarray(np.random.default_rng(0).permutation(blocks * 16)[:rows], jnp.int32)
    return Work(
        "kv_write", name, (pool, x, slots), {}, nbytes(x) * (1 + pool.dtype.itemsize / 2), 0
    )


def works() -> list[Callable[[], Work]]:
    """What is timed, made one at a time (the pools are large)."""
    gqa, mla = (
        {"heads": 32, "kv_heads": 8, "d": 128},
        {"heads": 128, "kv_heads": 1, "d": 576, "v_dim": 512, "block": 64},
    )
    fp8 = jnp.float8_e4m3fn
    attention = [
        ("paged_decode", "gqa 64 x 4096", {"sequences": 64, "rows": 1, "keys": 4096, **gqa}),
        (
            "paged_decode",
            "gqa 64 x 4096 e4m3",
            {"sequences": 64, "rows": 1, "keys": 4096, "dtype": fp8, **gqa},
        ),
        ("paged_decode", "gqa 4 x 32768", {"sequences": 4, "rows": 1, "keys": 32768, **gqa}),
        ("paged_decode", "gqa 256 x 512", {"sequences": 256, "rows": 1, "keys": 512, **gqa}),
        ("paged_decode", "mla 64 x 4096", {"sequences": 64, "rows": 1, "keys": 4096, **mla}),
        (
            "paged_decode",
            "mla 64 x 4096 e4m3",
            {"sequences": 64, "rows": 1, "keys": 4096, "dtype": fp8, **mla},
        ),
        ("paged_decode", "mla 4 x 32768", {"sequences": 4, "rows": 1, "keys": 32768, **mla}),
        ("ragged_prefill", "gqa 1 x 8192", {"sequences": 1, "rows": 8192, "keys": 8192, **gqa}),
        ("ragged_prefill", "gqa 16 x 512", {"sequences": 16, "rows": 512, "keys": 512, **gqa}),
        (
            "ragged_prefill",
            "gqa 1024 on 16384",
            {"sequences": 1, "rows": 1024, "keys": 16384, **gqa},
        ),
        (
            "ragged_prefill",
            "mla expanded 1 x 8192",
            {
                "sequences": 1,
                "rows": 8192,
                "keys": 8192,
                "heads": 32,
                "kv_heads": 32,
                "d": 192,
                "dv": 128,
            },
        ),
        (
            "ragged_prefill",
            "mla absorbed 64 on 16384",
            {"sequences": 1, "rows": 64, "keys": 16384, **mla},
        ),
    ]
    made = [functools.partial(attention_work, op, name, **shape) for op, name, shape in attention]
    qwen, deepseek = (
        {"experts": 128, "k": 2048, "n": 768},
        {"experts": 32, "k": 7168, "n": 2048, "fp8": True},
    )
    for rows in (256, 2048, 32768):
        made.append(
            functools.partial(experts_work, f"bf16 {rows} rows, 128 experts", rows=rows, **qwen)
        )
        made.append(
            functools.partial(experts_work, f"e4m3 {rows} rows, 32 experts", rows=rows, **deepseek)
        )
    made += [
        functools.partial(dense_work, f"e4m3 {rows} rows 7168 x 16384", rows=rows, n=7168, k=16384)
        for rows in (16, 256, 1024)
    ]
    made += [
        functools.partial(write_work, f"4096 rows {name}", rows=4096, blocks=65536, dtype=d)
        for name, d in (("bf16", jnp.bfloat16), ("e4m3", fp8))
    ]
    return made


def seconds(work: Work, implementation: str | None, loops: int, repeats: int) -> float:
    """Median time of one call, from a loop on the device. The barrier makes each call wait for the
    one before it."""
    call = functools.partial(OPS[work.op], implementation=implementation, **work.kwargs)

    @jax.jit
    def run(args, n):
        def write(_, pool):
            return call(pool, *args[1:])

        def attend(_, state):
            first, _ = state
            return lax.optimization_barrier((first, call(first, *args[1:])))

        if work.op == "kv_write":
            return lax.fori_loop(0, n, write, args[0]).ravel()[0]
        out = jax.eval_shape(call, *args)
        return lax.fori_loop(0, n, attend, (args[0], jnp.zeros(out.shape, out.dtype)))[1].ravel()[0]

    def timed(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(work.args, n))
        return time.perf_counter() - start

    timed(1)
    # the difference of two loop lengths: the launch and the first copy of a carried pool drop out
    return statistics.median(max(0.0, timed(loops + 1) - timed(1)) / loops for _ in range(repeats))


def measured_limits() -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a bf16 matmul) of this device."""
    x = normal(0, (1 << 29,))
    a = normal(1, (8192, 8192))

    def best(fn, arg) -> float:
        fn(arg).block_until_ready()
        times = []
        for _ in range(5):
            start, y = time.perf_counter(), arg
            for _ in range(10):
                y = fn(y)
            y.block_until_ready()
            times.append((time.perf_counter() - start) / 10)
        return min(times)

    copy = best(jax.jit(lambda v: v + jnp.bfloat16(1)), x)
    matmul = best(jax.jit(lambda m: (m @ a) * jnp.bfloat16(0.01)), a)
    return 2 * nbytes(x) / copy, 2 * 8192**3 / matmul


def time_all(only: str | None, xla_limit: float) -> list[dict]:
    bandwidth, rate = measured_limits()
    print(
        f"\nmeasured copy bandwidth {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f}"
        " TFLOP/s\n"
    )
    print(f"{'':44} {'floor ms':>9} {'ours ms':>9} {'of floor':>9} {'XLA ms':>9}")
    rows = []
    for make in works():
        if (
            only
            and only
            not in f"{make.args[0] if make.func is attention_work else make.func.__name__}"
            f" {make.args[-1]}"
        ):
            continue
        work = make()
        floor = max(work.bytes / bandwidth, work.flops / rate)
        dispatch.reset_explain()
        ours = seconds(work, None, 20, 5)
        chosen = next(c.name for c in dispatch.choices() if c.op == work.op)
        # the XLA path is a loop of small kernels where ours is one: a single short run where it
        # would take long
        xla = (
            ours
            if chosen == "xla"
            else seconds(work, "xla", 1, 1)
            if floor * 300 < xla_limit
            else None
        )
        rows.append(
            {
                "op": work.op,
                "name": work.name,
                "implementation": chosen,
                "floor_s": floor,
                "seconds": ours,
                "xla_s": xla,
            }
        )
        other = "      n/a" if xla is None else f"{xla * 1e3:9.3f}"
        share = floor / ours if ours else float("nan")
        print(
            f"{work.op:15} {work.name:28} {floor * 1e3:9.4f} {ours * 1e3:9.4f} {share:9.0%}"
            f" {other}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="correctness only, on any device; times nothing"
    )
    parser.add_argument("--only", help="cases whose op and name contain this text")
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="of the correctness inputs (default: the clock)",
    )
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.smoke:
        parser.error("timing needs a GPU; use --smoke on a CPU")
    print(
        f"{device.device_kind} ({kernels.current_target()}), jax {jax.__version__}, seed"
        f" {options.seed}"
    )
    checks = check_all(options.seed, options.only)
    wrong = [c for c in checks if not c["ok"]]
    print(f"{len(checks) - len(wrong)} of {len(checks)} correct")
    times = []
    if not options.smoke:
        times = time_all(options.only, xla_limit=0.5)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {
                    "device": device.device_kind,
                    "jax": jax.__version__,
                    "checks": checks,
                    "times": times,
                },
                file,
                indent=1,
            )
    return 1 if wrong or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
