"""How the size of an expert-parallel engine changes what one GPU of it does, in floors over an
efficiency: the numbers behind the last section of docs/capacity.md.

  JAX_PLATFORMS=cpu python benchmarks/capacity/by_ep.py [--efficiency 0.6] [--itl 0.05] [--context \
      1200]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer_jax import EngineArgs
from deepinfer_jax.launch.planner.gpus import find_gpu
from deepinfer_jax.launch.planner.search import FloorCosts, decode_rows, role_plans
from deepinfer_jax.scheduler.roles import EngineType

MODEL = Path(__file__).parents[2] / "examples" / "configs" / "deepseek-v3"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--efficiency", type=float, default=0.6)
    parser.add_argument("--itl", type=float, default=0.05)
    parser.add_argument("--context", type=float, default=1200)
    parser.add_argument("--sizes", default="8,16,32,64,128")
    options = parser.parse_args()
    args = EngineArgs(
        str(MODEL),
        dtype="bfloat16",
        quantization="fp8",
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
        block_size=64,
        chunked_prefill=True,
    )
    sizes = [int(s) for s in options.sizes.split(",")]
    print(
        "| GPU | ep | decode rows / GPU | decode step ms | binds | decode tok/s / GPU | prefill"
        " tok/s / GPU | binds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in ("h200", "gb200"):
        gpu = find_gpu(name)
        prompts = {p.config.axes.ep: p for p in role_plans(args, name, EngineType.PROMPT, sizes)}
        for plan in role_plans(args, name, EngineType.COMPLETION, sizes):
            ep = plan.config.axes.ep
            costs = FloorCosts(plan.costs, gpu, options.efficiency)
            rows = decode_rows(plan, costs, options.context, options.itl)
            step = costs.decode_floor(max(rows, 1), options.context)
            seconds = step.seconds / options.efficiency
            fill = FloorCosts(prompts[ep].costs, gpu, options.efficiency).prefill_floor(
                8192, options.context / 2
            )
            print(
                f"| {name} | {ep} | {rows} | {1e3 * seconds:.1f} | {step.binds} |"
                f" {rows / seconds:,.0f} | {8192 * options.efficiency / fill.seconds:,.0f} |"
                f" {fill.binds} |"
            )


if __name__ == "__main__":
    main()
