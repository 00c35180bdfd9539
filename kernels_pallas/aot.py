"""Compile every kernel for GPUs that are not there, and report what the compiler made of them.

    JAX_PLATFORMS=cpu python -m deepinfer_jax.kernels_pallas.aot [--target H200] [--only \
        paged_decode] [--json out.json]

Needs jax-cuda13-plugin in the version of jax, ptxas and libdevice (a CUDA 13 toolkit, or the wheels
nvidia-cuda-nvcc and nvidia-nvvm); nvdisasm on the PATH or as a wheel adds the count of tensor-core
instructions in the final code (else those of the PTX are counted). For each target the dispatch
table chooses; where it refuses a kernel the fallback is compiled instead, and the report says why.
Fails (exit 1) when something does not compile, a kernel spills registers or uses no tensor cores,
or a pool is copied.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import dispatch
from .gpu_targets import B200, H200
from .grouped_matmul import grouped_matmul, moe_experts
from .kv_write import kv_write
from .matmul import matmul
from .paged_decode import paged_decode
from .ragged_prefill import ragged_prefill

TARGETS = {"H200": (H200, (9, 0)), "B200": (B200, (10, 0))}
_BF16, _FP8, _I32, _F32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.float32


def _struct(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: `fn(*args)`; donate: the argument that must come back in place; inputs: what op
    and shapes are called."""

    op: str
    name: str
    fn: Callable
    args: tuple
    donate: int | None = None


@dataclasses.dataclass
class Report:
    """What one case became on one target. matrix: HGMMA or tcgen05 (or HMMA) instructions in the
    code."""

    target: str
    op: str
    name: str
    implementation: str = ""
    refused: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    matrix: str = ""
    temp_bytes: int = 0
    argument_bytes: int = 0
    problem: str = ""


def _attention_cases() -> Iterator[Case]:
    s, pages, blocks, t = 64, 128, 8192, 4096
    decode = (_struct((s, pages), _I32), _struct((s,), _I32))
    prefill = (
        _struct((16, pages), _I32),
        _struct((16,), _I32),
        _struct((17,), _I32),
        _struct((t,), _I32),
    )
    sinks = _struct((32,), _F32)
    for dtype, tag in ((_BF16, "bf16"), (_FP8, "e4m3")):
        for d in (64, 128):
            pool = _struct((blocks, 16, 8, d), dtype)
            call = functools.partial(paged_decode, scale=d**-0.5)
            yield Case(
                "paged_decode",
                f"gqa {d} {tag}",
                call,
                (_struct((s, 32, d), _BF16), pool, pool, *decode),
            )
            call = functools.partial(ragged_prefill, scale=d**-0.5)
            yield Case(
                "ragged_prefill",
                f"gqa {d} {tag}",
                call,
                (_struct((t, 32, d), _BF16), pool, pool, *prefill),
            )
        pool = _struct((blocks, 16, 8, 128), dtype)
        call = functools.partial(
            lambda *a, fn: fn(*a[:-1], scale=0.1, sinks=a[-1], sliding_window=128), fn=paged_decode
        )
        yield Case(
            "paged_decode",
            f"gqa 128 {tag} window sinks",
            call,
            (_struct((s, 32, 128), _BF16), pool, pool, *decode, sinks),
        )
        call = functools.partial(
            lambda *a, fn: fn(*a[:-1], scale=0.1, sinks=a[-1], sliding_window=128),
            fn=ragged_prefill,
        )
        yield Case(
            "ragged_prefill",
            f"gqa 128 {tag} window sinks",
            call,
            (_struct((t, 32, 128), _BF16), pool, pool, *prefill, sinks),
        )
        latent = _struct((blocks, 64, 1, 576), dtype)
        for heads in (16, 128):
            call = functools.partial(
                lambda q, k, *a, fn: fn(q, k, None, *a, scale=0.07, v_dim=512), fn=paged_decode
            )
            yield Case(
                "paged_decode",
                f"mla {heads} heads {tag}",
                call,
                (_struct((s, heads, 576), _BF16), latent, *decode),
            )
        call = functools.partial(
            lambda q, k, *a, fn: fn(q, k, None, *a, scale=0.07, v_dim=512), fn=ragged_prefill
        )
        yield Case(
            "ragged_prefill",
            f"mla absorbed {tag}",
            call,
            (_struct((256, 128, 576), _BF16), latent, *prefill[:3], _struct((256,), _I32)),
        )
    k, v = _struct((4096, 16, 16, 192), _BF16), _struct((4096, 16, 16, 128), _BF16)
    yield Case(
        "ragged_prefill",
        "mla expanded bf16",
        functools.partial(ragged_prefill, scale=0.07),
        (_struct((t, 16, 192), _BF16), k, v, *prefill),
    )


def _expert_cases() -> Iterator[Case]:
    e, n, k = 128, 768, 2048
    sizes = _struct((e,), _I32)
    for rows, label in ((512, "decode"), (32768, "prefill")):
        x = _struct((rows, k), _BF16)
        yield Case(
            "grouped_matmul", f"bf16 {label}", grouped_matmul, (x, _struct((e, n, k), _BF16), sizes)
        )
        call = functools.partial(
            lambda x, g, d, s, w, fn: fn(x, g, d, s, row_weights=w), fn=moe_experts
        )
        weights = (_struct((e, 2 * n, k), _BF16), _struct((e, k, n), _BF16))
        yield Case(
            "moe_experts", f"bf16 {label}", call, (x, *weights, sizes, _struct((rows,), _F32))
        )
        call = functools.partial(
            lambda x, g, d, s, gs, ds, fn: fn(x, g, d, s, scales=(gs, ds)), fn=moe_experts
        )
        weights = (_struct((e, 2 * n, k), _FP8), _struct((e, k, n), _FP8))
        scales = (
            _struct((e, 2 * n // 128, k // 128), _F32),
            _struct((e, k // 128, n // 128), _F32),
        )
        yield Case("moe_experts", f"e4m3 blocks {label}", call, (x, *weights, sizes, *scales))


def _dense_cases() -> Iterator[Case]:
    for rows, n, k in (
        (64, 7168, 16384),
        (256, 24576, 1536),
    ):  # DeepSeek-V3's attention output and query projections
        weights = (_struct((n, k), _FP8), _struct((n // 128, k // 128), _F32))
        yield Case("matmul", f"e4m3 {rows} rows", matmul, (_struct((rows, k), _BF16), weights))


def _write_cases() -> Iterator[Case]:
    for dtype, tag in ((_BF16, "bf16"), (_FP8, "e4m3")):
        pool, rows = _struct((8192, 16, 8, 128), dtype), _struct((4096, 8, 128), _BF16)
        yield Case("kv_write", tag, kv_write, (pool, rows, _struct((4096,), _I32)), donate=0)


def cases() -> list[Case]:
    return [*_attention_cases(), *_expert_cases(), *_dense_cases(), *_write_cases()]


@contextlib.contextmanager
def gpu_target(name: str, devices: int = 1) -> Iterator[Mesh]:
    """A mesh of compile-only devices; programs traced inside get the kernels of that GPU."""
    from jax.experimental import topologies

    config, capability = TARGETS[name]
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=config, topology=f"1x1x{devices}"
    )
    with jax.default_device(topology.devices[0]), dispatch.use_target("cuda", capability):
        yield Mesh(np.array(topology.devices), ("x",))


def check(case: Case, target: str, dump: str | None = None) -> Report:
    """Compile `case` for `target`. dump: the folder MOSAIC_GPU_DUMP_TO names, for registers and
    instructions."""
    report = Report(target, case.op, case.name)
    with gpu_target(target) as mesh:
        dispatch.reset_explain()
        sharding = NamedSharding(mesh, PartitionSpec())
        args = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), case.args
        )
        donate = () if case.donate is None else (case.donate,)
        compiled = (
            jax.jit(case.fn, donate_argnums=donate, out_shardings=sharding)
            .trace(*args)
            .lower()
            .compile()
        )
        choice = next(c for c in dispatch.choices() if c.op == case.op)
    report.implementation = choice.name
    report.refused = "; ".join(f"{name}: {why}" for name, why in choice.refused)
    memory = compiled.memory_analysis()
    report.temp_bytes, report.argument_bytes = (
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
    )
    if (
        case.donate is not None
        and memory.alias_size_in_bytes
        < case.args[case.donate].size * case.args[case.donate].dtype.itemsize
    ):
        report.problem = f"only {memory.alias_size_in_bytes} bytes of the donated pool are aliased"
    if choice.name != "xla" and dump:
        read_dump(report, dump)
    return report


def read_dump(report: Report, dump: str) -> None:
    """Registers, spills, shared memory and tensor-core instructions of the kernels dumped since the
    folder was emptied; worst of them."""
    texts = {
        kind: [path.read_text() for path in Path(dump).glob(f"*.{kind}")]
        for kind in ("ptxas", "resources.txt")
    }
    logs = "\n".join(texts["ptxas"])
    report.registers = max(map(int, re.findall(r"Used (\d+) registers", logs)), default=None)
    report.spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill", logs)))
    report.shared_bytes = max(
        (
            int(n)
            for text in texts["resources.txt"]
            for n in re.findall(r"smem_scratch_bytes=(\d+)", text)
        ),
        default=None,
    )
    kernels = sorted(glob.glob(f"{dump}/*.ptx"))
    report.matrix = " + ".join(_matrix_instructions(ptx) for ptx in kernels)
    if report.spill_bytes:
        report.problem = f"spills {report.spill_bytes} bytes"
    elif not kernels or any(_matrix_instructions(ptx).startswith("0") for ptx in kernels):
        report.problem = "no tensor-core instructions"


@functools.cache
def _nvdisasm() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        f
        for p in (spec.submodule_search_locations if spec else [])
        for f in glob.glob(f"{p}/**/bin/nvdisasm", recursive=True)
    ]
    return shutil.which("nvdisasm") or next(iter(wheels), None)


def _matrix_instructions(ptx: str) -> str:
    """E.g. "40 HGMMA" from the machine code, or "40 wgmma (PTX)" without nvdisasm."""
    text = Path(ptx).read_text()
    arch = re.search(r"\.target (\w+)", text).group(1)
    if _nvdisasm() and shutil.which("ptxas"):
        cubin = f"{ptx}.cubin"
        subprocess.run(["ptxas", "-arch", arch, ptx, "-o", cubin], check=True, capture_output=True)
        code = subprocess.run(
            [_nvdisasm(), cubin], check=True, capture_output=True, text=True
        ).stdout
        counts = collections.Counter(re.findall(r"\b(HGMMA|UTC[A-Z]*MMA|HMMA)\b", code))
        return ", ".join(f"{n} {name}" for name, n in counts.items()) or "0"
    counts = collections.Counter(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma)\b", text))
    return ", ".join(f"{n} {name} (PTX)" for name, n in counts.items()) or "0"


def empty(folder: str) -> None:
    for path in glob.glob(f"{folder}/*"):
        os.remove(path)


def run(targets: list[str], only: str | None) -> list[Report]:
    """Check every case on every target; prints one line each as it goes."""
    dump = os.environ.setdefault(
        "MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp(prefix="mosaic-")
    )  # read by Mosaic when it compiles
    reports = []
    for target in targets:
        for case in cases():
            if only and only not in f"{case.op} {case.name}":
                continue
            empty(dump)
            try:
                report = check(case, target, dump)
            except Exception as error:  # the report goes on to the other kernels; main() fails
                report = Report(
                    target,
                    case.op,
                    case.name,
                    problem=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                )
            reports.append(report)
            print(_line(report), flush=True)
    return reports


def _line(r: Report) -> str:
    left = f"{r.target} {r.op:15} {r.name:28} {r.implementation:11}"
    used = (
        f"{r.registers} regs, {r.spill_bytes} spilled, {r.shared_bytes} B shared, {r.matrix}; "
        if r.registers
        else ""
    )
    refused = f" [{r.refused}]" if r.refused and r.implementation == "xla" else ""
    failed = f"  FAILED: {r.problem}" if r.problem else ""
    return (
        f"{left} {used}temp {r.temp_bytes / 2**20:.1f} MiB of"
        f" {r.argument_bytes / 2**20:.0f}{refused}{failed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--only", help="cases whose op and name contain this text")
    parser.add_argument("--json", help="write the reports to this file")
    options = parser.parse_args()
    reports = run(options.target or list(TARGETS), options.only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(r) for r in reports], file, indent=1)
    failed = [r for r in reports if r.problem]
    print(f"{len(reports) - len(failed)} of {len(reports)} compiled as expected")
    return 1 if failed or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
