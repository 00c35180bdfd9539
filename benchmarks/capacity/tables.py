"""Writes the tables of docs/capacity.md: every model, GPU and role there, planned by the code
behind `deepinfer-jax plan`.

  # (needs the CUDA plugin; minutes of CPU per row)
  JAX_PLATFORMS=cpu python benchmarks/capacity/tables.py

Rows are kept in docs/capacity.json, one plan each, so that a run goes on where the last one
stopped; --fresh plans them again. Only what stands between the markers <!-- tables --> and <!--
/tables --> of docs/capacity.md is replaced. --estimate fills rows that are missing without
compiling.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from deepinfer_jax import EngineArgs
from deepinfer_jax.launch.planner.plan import make_plan
from deepinfer_jax.runner.memory import NotEnoughMemory
from deepinfer_jax.runner.model_source import use_compilation_cache

ROOT = Path(__file__).parents[2]
CONFIGS, DOCS = ROOT / "examples" / "configs", ROOT / "docs"
EP8 = {"quantization": "fp8", "data_parallel_size": 8, "expert_parallel_size": 8}
EP64 = {"quantization": "fp8", "data_parallel_size": 64, "expert_parallel_size": 64}
CASES = [
    ("llama-3.1-8b", {}, ("COMPLETION", "PROMPT", "NORMAL")),
    ("qwen3-30b-a3b", {}, ("COMPLETION", "PROMPT", "NORMAL")),
    ("deepseek-v3", {"quantization": "fp8"}, ("PROMPT",)),
    ("deepseek-v3", EP8, ("COMPLETION", "PROMPT", "NORMAL")),
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


def cells(name: str, plan: dict) -> list[str]:
    m, steps = plan["memory"], plan["steps"]
    gb = lambda x: f"{x / 1e9:.2f}"  # noqa: E731
    moved = sum(entry["bytes"] for entry in plan["collectives"].values())
    decodes = plan["role"] != "PROMPT"
    at_64 = next((s for s in reversed(steps) if s["tokens"] == 64), None) if decodes else None
    last = steps[-1]
    return [
        name,
        plan["gpu"],
        plan["role"],
        f"{plan['devices']} (dp {plan['dp']}, ep {plan['ep']})",
        gb(m["params_bytes"]),
        gb(m["temp_bytes"]) + (" est." if plan["estimated"] else ""),
        f"{m['num_blocks']:,}" + (" (all useful)" if m["num_blocks"] == m["useful_blocks"] else ""),
        f"{plan['kv_tokens_per_rank']:,}",
        f"{moved / 1e6:.0f}" if moved else "-",
        f"{1e3 * at_64['seconds']:.2f} ({at_64['binds']})" if at_64 else "-",
        f"{1e3 * last['seconds']:.1f} ({last['binds']}), {last['tokens']} rows",
    ]


def plan_missing(plans: dict[str, dict], gpus: list[str], estimate: bool, file: Path) -> None:
    for model, layout, roles in CASES:
        for gpu in gpus:
            prompt = None
            for role in roles:
                key = f"{model} {gpu} {role} ep{layout.get('expert_parallel_size', 1)}"
                if key in plans and not (plans[key].get("estimated") and not estimate):
                    continue
                start = time.time()
                try:
                    shared = prompt if role == "NORMAL" else None
                    plan = make_plan(
                        args_for(model, layout, role),
                        gpu,
                        compile_programs=not estimate,
                        compiled=shared,
                    )
                    prompt = plan if role == "PROMPT" else prompt
                    plans[key] = plan.as_dict() | {"model": model}
                except NotEnoughMemory as error:
                    plans[key] = {"refused": str(error), "gpu": gpu, "model": model}
                file.write_text(json.dumps(plans, indent=1) + "\n")
                print(f"{key}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)


def tables(plans: dict[str, dict]) -> str:
    head = [
        "model",
        "GPU",
        "role",
        "devices",
        "weights GB",
        "temporaries GB",
        "KV blocks / rank",
        "KV tokens / rank",
    ]
    head += ["exchanged MB / step", "decode 64 rows, floor ms", "largest step, floor ms"]
    rows = [cells(p["model"], p) for p in plans.values() if "refused" not in p]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    refused = [
        f"- {p['model']} on one {p['gpu']}: {p['refused']}"
        for p in plans.values()
        if "refused" in p
    ]
    return "\n".join([*lines, "", "Refused:", "", *refused])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default="h200,b200")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    use_compilation_cache()
    kept, page = DOCS / "capacity.json", DOCS / "capacity.md"
    plans = json.loads(kept.read_text()) if kept.exists() and not options.fresh else {}
    plan_missing(plans, options.gpus.split(","), options.estimate, kept)
    made = tables(plans)
    page.write_text(
        re.sub(
            r"(<!-- tables -->\n).*?(\n<!-- /tables -->)",
            lambda m: m[1] + made + m[2],
            page.read_text(),
            flags=re.DOTALL,
        )
    )


if __name__ == "__main__":
    main()
