"""What warm-up costs on a GPU that is not there: seconds to trace and lower each program of a role,
to compile it, and to find it in the persistent cache.

  JAX_PLATFORMS=cpu python benchmarks/warm_up.py [--model deepseek-v3] [--ep 8] [--gpu h200] \
      [--role COMPLETION] [--programs 16] [--no-compile] [--restart]

Needs what `python -m deepinfer_jax.kernels_pallas.aot` needs. The engine's own programs at full
depth and width. CPU seconds are of the whole process, its threads included; one line per program,
the sum at the end. --restart compiles every program twice, the second time from the persistent
cache, with JAX's caches in memory cleared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from deepinfer_jax import EngineArgs
from deepinfer_jax.config import EngineConfig
from deepinfer_jax.launch.planner.gpus import find_gpu
from deepinfer_jax.launch.planner.plan import plan_mesh
from deepinfer_jax.models.loading import abstract_model
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.runner.programs import StepPrograms

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"


@dataclass
class Seconds:
    """CPU and wall seconds of one part."""

    cpu: float = 0.0
    wall: float = 0.0

    def __enter__(self) -> Seconds:
        self._start = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu = time.process_time() - self._start[0]
        self.wall = time.perf_counter() - self._start[1]

    def __str__(self) -> str:
        return f"{self.cpu:7.1f} CPU s ({self.wall:7.1f} s)"


def engine_args(folder: str, hf: dict, role: str, ep: int) -> EngineArgs:
    return EngineArgs(
        folder,
        engine_type=role,
        zero_overhead_scheduling=role != "PROMPT",
        quantization="fp8" if "quantization_config" in hf else None,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        block_size=64,
        data_parallel_size=ep,
        expert_parallel_size=ep,
        chunked_prefill=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="deepseek-v3", choices=sorted(p.name for p in CONFIGS.iterdir())
    )
    parser.add_argument("--role", default="COMPLETION", choices=["NORMAL", "PROMPT", "COMPLETION"])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, help="cut the model to so many (default: all)")
    parser.add_argument("--programs", type=int, help="only the first so many")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--restart", action="store_true")
    options = parser.parse_args()
    hf = json.loads((CONFIGS / options.model / "config.json").read_text())
    if options.layers:
        hf["num_hidden_layers"] = options.layers
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        args = engine_args(folder, hf, options.role, options.ep)
        source = ModelSource.find(args)
        config = EngineConfig.resolve(args, source.config)
        graphdef, params, specs = abstract_model(
            source.config, source.model_class, config.axes, config.dtype, config.quantization
        )
        caches = source.model_class.cache_specs(source.config, config.axes, config.kv_dtype)
        if options.restart:
            jax.config.update("jax_compilation_cache_dir", folder)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        with plan_mesh(config.axes, find_gpu(options.gpu), True) as mesh:
            programs = StepPrograms(config, source.config, graphdef, params, specs, caches, mesh)
            measure(programs, options)


def measure(programs: StepPrograms, options: argparse.Namespace) -> None:
    totals: dict[str, Seconds] = {}
    keys = programs.warm_up_keys()
    print(f"{options.role} of {options.model} on {options.gpu}: {len(keys)} programs at warm-up")
    for again in ("", "restart ")[: 2 if options.restart else 1]:
        for key in keys[: options.programs]:
            with Seconds() as lowering:
                lowered = programs.lower(key, num_blocks=4096)
            parts = {"lowering": lowering}
            if not options.no_compile:
                with Seconds() as compiling:
                    lowered.compile()
                parts["compile"] = compiling
            for name, seconds in parts.items():
                total = totals.setdefault(again + name, Seconds())
                total.cpu, total.wall = total.cpu + seconds.cpu, total.wall + seconds.wall
            said = ", ".join(f"{again}{name} {seconds}" for name, seconds in parts.items())
            print(f"{key!s:20} {said}", flush=True)
        jax.clear_caches()
    for name, seconds in totals.items():
        print(f"{'all':20} {name} {seconds}")


if __name__ == "__main__":
    main()
