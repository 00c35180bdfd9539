"""What XLA makes of a whole step for a GPU that is not there: are pools copied, and what lies
between the projections and attention?

  JAX_PLATFORMS=cpu python benchmarks/gpu_steps.py [--model llama-3.1-8b] [--kind decode|prefill] \
      [--gpu h200] [--text FILE]

Needs what `python -m deepinfer_jax.kernels_pallas.aot` needs. The engine's own programs are
compiled at full width with two layers and pools far larger than anything else in the step. Fails
(exit 1) when pools come back other than in place or the temporaries could hold one. Then lists the
kernels of the last layer from its projection to its attention, with the bytes of their results.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax

from deepinfer_jax import EngineArgs
from deepinfer_jax.config import EngineConfig
from deepinfer_jax.launch.planner.gpus import find_gpu
from deepinfer_jax.launch.planner.plan import plan_mesh
from deepinfer_jax.models.loading import abstract_model
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.runner.programs import StepPrograms

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
POOL_BYTES = 8 << 30  # of one layer's smallest pool
SIZES = {"decode": 256, "prefill": 8192}
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "s64": 8,
}


@dataclass(frozen=True)
class Step:
    """One compiled step program. pools: shapes and bytes of the caches' arrays."""

    pools: tuple[tuple[tuple[int, ...], int], ...]
    temp_bytes: int
    alias_bytes: int
    text: str

    def problem(self) -> str | None:
        """Why a pool is not where it was; None if all are."""
        if self.alias_bytes < sum(size for _, size in self.pools):
            return (
                f"only {self.alias_bytes} of {sum(size for _, size in self.pools)} bytes of pools"
                " come back in place"
            )
        if self.temp_bytes >= min(size for _, size in self.pools):
            return f"temporaries of {self.temp_bytes} bytes could hold a pool"
        return None


def compile_step(model: str, kind: str, gpu: str) -> Step:
    """model: a folder of examples/configs, cut to two layers. kind: "decode" or "prefill", of the
    size in SIZES."""
    hf = json.loads((CONFIGS / model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(hf | {k: v for k, v in LAYERS.items() if k in hf})
        )
        args = EngineArgs(
            folder,
            engine_type="COMPLETION" if kind == "decode" else "PROMPT",
            zero_overhead_scheduling=kind == "decode",
            quantization="fp8" if "quantization_config" in hf else None,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            block_size=64,
            chunked_prefill=True,
        )
        source = ModelSource.find(args)
        config = EngineConfig.resolve(args, source.config)
    graphdef, params, specs = abstract_model(
        source.config, source.model_class, config.axes, config.dtype, config.quantization
    )
    caches = source.model_class.cache_specs(source.config, config.axes, config.kv_dtype)
    with plan_mesh(config.axes, find_gpu(gpu), True) as mesh:
        programs = StepPrograms(config, source.config, graphdef, params, specs, caches, mesh)
        per_block = min(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(programs.abstract_caches(1))
        )
        blocks = POOL_BYTES // per_block
        compiled = programs.lower(ProgramKey(kind, SIZES[kind]), num_blocks=blocks).compile()
        pools = tuple(
            (x.shape, x.size * x.dtype.itemsize)
            for x in jax.tree.leaves(programs.abstract_caches(blocks))
        )
    memory = compiled.memory_analysis()
    return Step(pools, memory.temp_size_in_bytes, memory.alias_size_in_bytes, compiled.as_text())


# ---- the kernels of a layer, from the compiled text ----------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One kernel of the schedule. what: "matmul", "write" (a scatter), "mosaic", "other" or XLA's
    name of an operation."""

    name: str
    what: str
    out_bytes: int
    shapes: str


def launches(text: str) -> list[Launch]:
    """The kernels of the entry computation of a compiled program, in the order they run."""
    bodies = {
        m[1]: m[2]
        for m in re.finditer(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    }
    found = []
    for line in text[text.index("\nENTRY") :].splitlines()[2:]:
        match = re.match(
            r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) (fusion|custom-call|while|copy|sort|all-to-all)\(",
            line,
        )
        if match is None:
            continue
        name, shapes, op = match.groups()
        called = re.search(r"calls=%([\w.\-]+)", line)
        body = bodies.get(called[1], "") if called else ""
        if (
            "mosaic_gpu" in line or "mosaic_gpu" in body
        ):  # the latter: a call whose operand is a slice
            what = "mosaic"
        elif re.search(r" dot\(", body) or "gemm" in name or "cublas" in line:
            what = "matmul"
        else:
            what = "write" if " scatter(" in body else "other" if op == "fusion" else op
        found.append(
            Launch(name, what, result_bytes(shapes), re.sub(r"\{[\d,:\w()]*\}", "", shapes))
        )
    return found


def result_bytes(shapes: str) -> int:
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        total += math.prod(map(int, filter(None, dims.split(",")))) * ITEM_BYTES.get(dtype, 0)
    return total


def before_attention(found: list[Launch], pool_bytes: int) -> list[Launch]:
    """The last layer's launches from the product before its pools are written to the kernel that
    reads them."""
    writes = [i for i, x in enumerate(found) if x.what == "write" and x.out_bytes >= pool_bytes]
    end = next(i for i in range(writes[-1], len(found)) if found[i].what in ("mosaic", "while"))
    first = next(i for i in writes if all(x.what not in ("mosaic", "while") for x in found[i:end]))
    start = max(i for i in range(first) if found[i].what == "matmul")
    return found[start : end + 1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="default: llama-3.1-8b, qwen3-30b-a3b and deepseek-v3"
    )
    parser.add_argument("--kind", action="append", choices=sorted(SIZES), help="default: decode")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--text", help="write the last step's compiled text to this file")
    options = parser.parse_args()
    failed = False
    for model in options.model or ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"]:
        for kind in options.kind or ["decode"]:
            step = compile_step(model, kind, options.gpu)
            problem = step.problem()
            failed |= problem is not None
            smallest = min(size for _, size in step.pools)
            pools = f"{len(step.pools)} pools of {smallest / 1e9:.1f} GB or more"
            pools += f", temporaries {step.temp_bytes / 1e9:.2f} GB: {problem or 'in place'}"
            print(f"{model} {kind}[{SIZES[kind]}] {options.gpu}: {pools}")
            if options.text:
                Path(options.text).write_text(step.text)
            for launch in before_attention(launches(step.text), smallest):
                size = (
                    "in place"
                    if launch.out_bytes >= smallest
                    else f"{launch.out_bytes / 1e6:.2f} MB"
                )
                print(f"  {launch.what:7} {size:>9}  {launch.name}  {launch.shapes}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
