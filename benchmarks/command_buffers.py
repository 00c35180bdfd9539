"""How many graphs a step is on a GPU that is not there, and what stays outside of them.

  JAX_PLATFORMS=cpu python benchmarks/command_buffers.py [--model llama-3.1-8b] \
      [--role COMPLETION] [--ep 1] [--layers 2] [--gpu h200] [--default]

Needs what `python -m deepinfer_jax.kernels_pallas.aot` needs. Compiles the role's own programs with
the engine's options (deepinfer_jax/runner/gpu_settings.py), or with XLA's (--default), and reads
XLA's list of thunks: its top-level ones, and those among them for which the host waits.
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import re
import tempfile
from pathlib import Path

from warm_up import CONFIGS, engine_args

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.launch.planner.gpus import find_gpu
from deepinfer_jax.launch.planner.plan import plan_mesh
from deepinfer_jax.models.loading import abstract_model
from deepinfer_jax.runner import gpu_settings
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.runner.programs import StepPrograms

SIZES = {"decode": 64, "prefill": 2048}
KINDS = {"COMPLETION": ("decode",), "PROMPT": ("prefill",), "NORMAL": ("decode", "prefill")}
BLOCKING = ("kWhile", "kConditional")
CUTS = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}


def top_level(text: str) -> collections.Counter[str]:
    """Kinds of the thunks that are not inside another one."""
    return collections.Counter(re.findall(r"^\S*\s*(k[A-Z]\w+)", text, re.MULTILINE))


def thunks(programs: StepPrograms, key: ProgramKey) -> collections.Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        programs.lower(key, num_blocks=4096).compile(compiler_options={"xla_dump_to": folder})
        after = glob.glob(f"{folder}/*thunk_sequence_after_thunk_passes.txt")
        found = after or glob.glob(f"{folder}/*thunk_sequence.txt")
        return top_level(max((Path(f).read_text() for f in found), key=len))


def build(options: argparse.Namespace, hf: dict, folder: str):
    Path(folder, "config.json").write_text(json.dumps(hf))
    args = engine_args(folder, hf, options.role, options.ep)
    source = ModelSource.find(args)
    config = EngineConfig.resolve(args, source.config)
    parts = abstract_model(
        source.config, source.model_class, config.axes, config.dtype, config.quantization
    )
    caches = source.model_class.cache_specs(source.config, config.axes, config.kv_dtype)
    return config, source, parts, caches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--role", default="COMPLETION", choices=sorted(KINDS))
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2, help="0: all")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--default", action="store_true", help="without the engine's options")
    options = parser.parse_args()
    if options.default:
        gpu_settings.FLAGS = ()
    hf = json.loads((CONFIGS / options.model / "config.json").read_text())
    if options.layers:
        hf |= {"num_hidden_layers": options.layers} | {k: v for k, v in CUTS.items() if k in hf}
    with tempfile.TemporaryDirectory() as folder:
        config, source, parts, caches = build(options, hf, folder)
        with plan_mesh(config.axes, find_gpu(options.gpu), True) as mesh:
            programs = StepPrograms(config, source.config, *parts, caches, mesh)
            for kind in KINDS[options.role]:
                key = ProgramKey(kind, SIZES[kind])
                found = thunks(programs, key)
                said = ", ".join(f"{n} {kind}" for kind, n in found.most_common())
                waits = sum(found[kind] for kind in BLOCKING)
                print(f"{options.model} {options.role} {key}: {said}; the host waits for {waits}")


if __name__ == "__main__":
    main()
