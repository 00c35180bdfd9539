"""Do several jobs give the tokens of one NORMAL engine?

    python tests/helpers/processes/equal_tokens.py [--model demo] [--layout pd ...]

  pd      router, two prompt jobs (one of two processes), two completion jobs (one of two processes)
  normal  a NORMAL job of two processes with four devices each, once per mesh that the model allows:
          dp x ep and dp x tp

The reference is a NORMAL engine on one device in this process. Prints, per layout and mesh, how
many answers are equal; exit code 1 unless all are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from deployment import ROOT, SMALL, Deployment

from deepinfer_jax import LLM, SamplingParams

MOE_MESHES = (
    {"data_parallel_size": 8, "expert_parallel_size": 8},
    {"data_parallel_size": 8, "expert_parallel_size": 4},
)
MOE_TP = {"data_parallel_size": 4, "expert_parallel_size": 4, "tensor_parallel_size": 2}
DENSE_MESHES = ({"data_parallel_size": 8}, {"data_parallel_size": 4, "tensor_parallel_size": 2})


def prompts_of(model: str, llm: LLM) -> list[list[int]]:
    if model == "demo":
        lines = (ROOT / "examples" / "demo_prompts.txt").read_text().splitlines()
        return [llm.engine.tokenizer.encode(line) for line in lines if line]
    data = np.load(ROOT / "tests" / "golden" / model / "golden.npz")
    return [data[f"prompt_{i}"].tolist() for i in range(sum(k.startswith("prompt_") for k in data))]


def start_pd(d: Deployment, model: str, moe: bool, **flags: Any) -> list[str]:
    """Starts the engines of layout "pd", their names: jobs of one rank, of two in one process, of
    two in two processes."""
    two = {"data_parallel_size": 2} | ({"expert_parallel_size": 2} if moe else {})
    names = d.job("prompt", "P1", model, cpu_devices=1, **two, **flags) + d.job(
        "completion", "C1", model, cpu_devices=1, **two, **flags
    )
    d.engine("prompt", "P0", model, **flags)
    d.engine("completion", "C0", model, cpu_devices=2, **two, **flags)
    return ["P0", "C0", *names]


def layouts(wanted: list[str], model: str, moe: bool, splits: bool) -> Iterator[tuple[str, Any]]:
    """(name, function that starts engines and returns their names)."""
    if "pd" in wanted:
        yield "pd", lambda d: start_pd(d, model, moe)
    if "normal" in wanted:
        for mesh in (*MOE_MESHES, MOE_TP) if moe else DENSE_MESHES[: 1 + splits]:
            text = " ".join(f"{k.split('_')[0]}={v}" for k, v in mesh.items())
            yield (
                f"normal {text}",
                lambda d, mesh=mesh: d.job("normal", "N", model, cpu_devices=4, **mesh),
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help='"demo", or a folder of tests/golden')
    parser.add_argument("--layout", nargs="+", default=["pd", "normal"], choices=("pd", "normal"))
    parser.add_argument("--copies", type=int, default=4, help="of every prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    path = args.model if args.model == "demo" else str(ROOT / "tests" / "golden" / args.model)
    sizes = {k.replace("-", "_"): v for k, v in SMALL.items()} | {
        "prefill_buckets": (256,),
        "decode_buckets": (8,),
    }
    with LLM(path, **sizes) as llm:
        prompts = prompts_of(args.model, llm) * args.copies
        config = llm.engine.model_config
        moe, splits = getattr(config, "router", None) is not None, config.num_kv_heads % 2 == 0
        expected = [
            o.outputs[0].token_ids
            for o in llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        ]
    equal = True
    for name, start in layouts(args.layout, args.model, moe, splits):
        with (
            tempfile.TemporaryDirectory() as folder,
            Deployment(Path(folder), plain=True, peer_timeout=20) as d,
        ):
            engines = start(d)
            d.joined(*engines)
            d.wait_for_engines(*engines, timeout=300)
            with LLM(router=d.address) as llm:
                begin = time.monotonic()
                outputs = llm.generate(
                    prompt_token_ids=prompts, sampling_params=params, use_tqdm=False
                )
                seconds = time.monotonic() - begin
            d.wait_idle()
            same = sum(o.outputs[0].token_ids == e for o, e in zip(outputs, expected, strict=True))
            steps = {e["name"]: int(e["steps"]) for e in d.status()["engines"]}
            print(
                f"{args.model}, {name}: {same} of {len(expected)} answers equal in {seconds:.1f} s;"
                f" steps {steps}",
                flush=True,
            )
            equal &= same == len(expected)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
