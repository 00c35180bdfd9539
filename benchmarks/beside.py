"""Does a request get the same tokens beside others as alone?

    python benchmarks/beside.py [--model demo] [--dtype bfloat16] [--max-tokens 48]

Eight questions, each alone, then all of them beside eight more in one batch; sampled (temperature
0.8, a seed per request) and greedy. Prints how many of the eight have the same tokens, and where
the others first differ. The draw is the same; logits are rounded differently in batches of another
shape.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from deepinfer_jax import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Tell me a short story about a cat.",
    "How do I boil an egg?",
    "What is 12 times 11?",
    "Explain gravity to a child.",
]


def tokens(llm: LLM, questions: list[str], params: list[SamplingParams]) -> list[list[int]]:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    sizes = dict(max_model_len=256, max_num_seqs=16, num_blocks=512, max_num_batched_tokens=1024)
    buckets = dict(prefill_buckets=(64, 1024), decode_buckets=(1, 16))
    with LLM(args.model, dtype=args.dtype, warm_up=False, **sizes, **buckets) as llm:
        for temperature in (0.8, 0.0):
            params = [
                SamplingParams(
                    temperature=temperature, seed=i, max_tokens=args.max_tokens, ignore_eos=True
                )
                for i in range(2 * len(QUESTIONS))
            ]
            alone = [tokens(llm, [p], [s])[0] for p, s in zip(QUESTIONS, params, strict=False)]
            beside = tokens(llm, QUESTIONS + QUESTIONS, params)
            first = [first_difference(a, b) for a, b in zip(alone, beside, strict=False)]
            print(
                f"{args.model} {args.dtype} temperature {temperature}: the same tokens for"
                f" {sum(f is None for f in first)} of {len(first)}; first differences at"
                f" {[f for f in first if f is not None]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
