"""Compile every kernel for GPUs that are not there, and report what the compiler made of them.

    JAX_PLATFORMS=cpu python -m deepinfer_jax.kernels_pallas.aot [--target h200] [--only \
        paged_decode] [--json out.json]

Needs jax-cuda13-plugin in the version of jax, ptxas and libdevice (a CUDA 13 toolkit, or the wheels
nvidia-cuda-nvcc and nvidia-nvvm); nvdisasm on the PATH or as a wheel adds the count of tensor-core
instructions in the final code (else those of the PTX are counted). For each target the dispatch
table chooses; where it refuses a kernel the fallback is compiled instead, and the report says why.
Each target has a process of its own, see `check.claim_architecture`.

Fails (exit 1) when something does not compile, a kernel spills registers or uses no tensor cores,
takes more shared memory than the target has, copies by TMA at an address that may not be aligned,
or a pool is copied.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deepinfer_jax.kernels_pallas.aot.cases import cases
from deepinfer_jax.kernels_pallas.aot.check import Report, check
from deepinfer_jax.kernels_pallas.aot.targets import TARGETS, GpuTarget, find_target

DEFAULT_TARGETS = ("h200", "b200")


def run(target: GpuTarget, only: str | None) -> list[Report]:
    """Check every case on one target; prints one line each as it goes."""
    dump = os.environ.setdefault(
        "MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp(prefix="mosaic-")
    )  # read by Mosaic when it compiles
    reports = []
    for case in cases():
        if only and only not in f"{case.op} {case.name}":
            continue
        for path in glob.glob(f"{dump}/*"):
            os.remove(path)
        try:
            report = check(case, target, dump)
        except Exception as error:  # the report goes on to the other kernels; main() fails
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            report = Report(target.name, case.op, case.name, problem=problem)
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


def _in_processes(targets: list[str], only: str | None) -> list[Report]:
    """`run` for each target, in a process of its own."""
    reports = []
    for target in targets:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "reports.json"
            command = [sys.executable, "-m", "deepinfer_jax.kernels_pallas.aot"]
            command += ["--target", target, "--json", str(out)] + (["--only", only] if only else [])
            subprocess.run(command, check=False)
            reports += [Report(**r) for r in json.loads(out.read_text())] if out.exists() else []
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=sorted(TARGETS),
        help=f"default: {', '.join(DEFAULT_TARGETS)}",
    )
    parser.add_argument("--only", help="cases whose op and name contain this text")
    parser.add_argument("--json", help="write the reports to this file")
    options = parser.parse_args()
    targets = options.target or list(DEFAULT_TARGETS)
    if len(targets) == 1:
        reports = run(find_target(targets[0]), options.only)
    else:
        reports = _in_processes(targets, options.only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(r) for r in reports], file, indent=1)
    failed = [r for r in reports if r.problem]
    print(f"{len(reports) - len(failed)} of {len(reports)} compiled as expected")
    missing = {TARGETS[t].name for t in targets} - {r.target for r in reports}
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
