"""vLLM (its CPU build) as a benchmark worker: python vllm_worker.py MODEL_FOLDER DTYPE

By itself it leaves one core to its front end; here it gets all of them, like the other engines.
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from worker import serve  # first: see there

# isort: split
from vllm import LLM, SamplingParams


def main():
    folder, dtype = sys.argv[1:]
    llm = LLM(folder, dtype=dtype, max_model_len=512, max_num_seqs=32, enable_prefix_caching=False)

    def generate(prompts, max_tokens):
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    serve(generate)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
