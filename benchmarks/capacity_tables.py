"""Writes the tables of docs/capacity.md: every model, GPU and role there, planned by the code behind `deepinfer-jax plan`.

  JAX_PLATFORMS=cpu python benchmarks/capacity_tables.py docs/capacity.md        (needs the CUDA plugin; about half an hour of CPU)
  JAX_PLATFORMS=cpu python benchmarks/capacity_tables.py --estimate docs/capacity.md

Only what stands between the markers <!-- tables --> and <!-- /tables --> is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from deepinfer_jax import EngineArgs
from deepinfer_jax.launch.plan import Plan, make_plan
from deepinfer_jax.memory import NotEnoughMemory

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
EP8 = {"quantization": "fp8", "data_parallel_size": 8, "expert_parallel_size": 8}
EP64 = {"quantization": "fp8", "data_parallel_size": 64, "expert_parallel_size": 64}
CASES = [
    ("llama-3.1-8b", {}, ("NORMAL", "PROMPT", "COMPLETION")),
    ("qwen3-30b-a3b", {}, ("NORMAL", "PROMPT", "COMPLETION")),
    ("deepseek-v3", {"quantization": "fp8"}, ("NORMAL",)),
    ("deepseek-v3", EP8, ("NORMAL", "PROMPT", "COMPLETION")),
    ("deepseek-v3", EP64, ("COMPLETION",)),
]


def args_for(model: str, layout: dict, role: str) -> EngineArgs:
    return EngineArgs(
        str(CONFIGS / model),
        engine_type=role,
        zero_overhead_scheduling=role != "PROMPT",
        dtype="bfloat16",
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        block_size=64,
        chunked_prefill=True,
        **layout,
    )


def row(plan: Plan, gpu: str) -> str:
    m, axes = plan.memory, plan.config.axes
    gb = lambda x: f"{x / 1e9:.1f}"  # noqa: E731
    moved = sum(entry["bytes"] for entry in plan.collectives.values())
    decodes = plan.floors[len(plan.config.prefill_buckets) :]
    at_64 = next((f for f in decodes if f.tokens == 64), None)
    step = plan.floors[-1]
    cells = [
        f"{Path(plan.args.model).name}",
        gpu,
        plan.config.role.name,
        f"{plan.devices} (dp {axes.dp}, ep {axes.ep})",
        gb(m.params_bytes),
        gb(m.temp_bytes) + (" est." if plan.estimated else ""),
        f"{m.num_blocks:,}" + ("" if m.num_blocks < m.useful_blocks else " (all useful)"),
        f"{plan.kv_tokens:,}",
        f"{moved / 1e6:.0f}" if plan.collectives else "-",
        f"{1e3 * at_64.seconds:.2f} ({at_64.binds})" if at_64 else "-",
        f"{1e3 * step.seconds:.1f} ({step.binds}), {step.tokens} rows",
    ]
    return "| " + " | ".join(cells) + " |"


def tables(gpus: list[str], estimate: bool) -> str:
    head = ["model", "GPU", "role", "devices", "weights GB", "temporaries GB", "KV blocks / rank", "KV tokens / rank"]
    head += ["exchanged MB / step", "decode 64 rows, floor ms", "largest step, floor ms"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    refused = []
    for gpu in gpus:
        for model, layout, roles in CASES:
            for role in roles:
                start = time.time()
                try:
                    lines.append(row(make_plan(args_for(model, layout, role), gpu, compile_programs=not estimate), gpu))
                except NotEnoughMemory as error:
                    refused.append(f"- `{model}` on one {gpu}: {error}")
                print(f"{model} {gpu} {role}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    return "\n".join([*lines, "", "Refused:", "", *refused])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpus", default="h200,b200")
    parser.add_argument("--estimate", action="store_true")
    options = parser.parse_args()
    made = tables(options.gpus.split(","), options.estimate)
    text = options.file.read_text()
    marked = re.sub(r"(<!-- tables -->\n).*?(\n<!-- /tables -->)", lambda m: m[1] + made + m[2], text, flags=re.DOTALL)
    if marked == text:
        raise SystemExit(f"{options.file} has no <!-- tables --> markers, or nothing changed")
    options.file.write_text(marked)


if __name__ == "__main__":
    main()
