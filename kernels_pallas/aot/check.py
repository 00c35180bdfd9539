"""Compiles one case for a GPU that is not there, and reads what the compiler made of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import glob
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.kernels_pallas import dispatch
from deepinfer_jax.kernels_pallas.aot.alignment import misaligned
from deepinfer_jax.kernels_pallas.aot.cases import Case
from deepinfer_jax.kernels_pallas.aot.targets import GpuTarget

_architectures: set[tuple[int, int]] = set()


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


def claim_architecture(target: GpuTarget) -> None:
    """To be called before anything is compiled for a GPU that is not there.

    Raises RuntimeError when this process has compiled for another architecture: Mosaic's second one
    in a process fails in ptxas, or worse passes with the first one's features.
    """
    _architectures.add(target.capability)
    if len(_architectures) > 1:
        raise RuntimeError(
            f"one process compiles ahead of time for one architecture, not for"
            f" {sorted(_architectures)}: start another for {target.name}"
        )


@contextlib.contextmanager
def gpu_target(target: GpuTarget, devices: int = 1) -> Iterator[Mesh]:
    """A mesh of compile-only devices; programs traced inside get the kernels of that GPU."""
    from jax.experimental import topologies

    claim_architecture(target)
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target.config(), topology=f"1x1x{devices}"
    )
    with jax.default_device(topology.devices[0]):
        yield Mesh(np.array(topology.devices), ("x",))


def check(case: Case, target: GpuTarget, dump: str | None = None) -> Report:
    """Compile `case` for `target`. dump: the folder MOSAIC_GPU_DUMP_TO names, for registers and
    instructions."""
    report = Report(target.name, case.op, case.name)
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
        read_dump(report, dump, target)
    return report


def read_dump(report: Report, dump: str, target: GpuTarget) -> None:
    """Registers, spills, shared memory and tensor-core instructions of the kernels dumped since the
    folder was emptied; worst of them."""
    logs = "\n".join(path.read_text() for path in Path(dump).glob("*.ptxas"))
    report.registers = max(map(int, re.findall(r"Used (\d+) registers", logs)), default=None)
    report.spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill", logs)))
    layouts = [path.read_text() for path in Path(dump).glob("*.after_layout_inference.txt")]
    sizes = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", "\n".join(layouts))
    report.shared_bytes = max(map(int, sizes), default=None)
    kernels = sorted(glob.glob(f"{dump}/*.ptx"))
    report.matrix = " + ".join(_matrix_instructions(ptx) for ptx in kernels)
    off = [str(copy) for ptx in kernels for copy in misaligned(Path(ptx).read_text())]
    limit = target.shared_bytes_per_block
    if report.spill_bytes:
        report.problem = f"spills {report.spill_bytes} bytes"
    elif off:
        report.problem = "; ".join(off)
    elif report.shared_bytes and report.shared_bytes > limit:
        report.problem = f"{report.shared_bytes} bytes of shared memory, the device has {limit}"
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
