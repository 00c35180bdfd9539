"""vLLM (its CPU build) as a benchmark worker: python vllm_worker.py MODEL_FOLDER DTYPE SETTING

default: as it comes, with the benchmark's lengths and number of sequences. tuned: all cores (by
itself it leaves one to its front end), and no prefix cache, which no prompt here can use.
"""

import os
import sys

if sys.argv[3:] == ["tuned"]:
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from worker import serve  # first: see there

# isort: split
from vllm import LLM, SamplingParams


def main():
    folder, dtype, setting = sys.argv[1:]
    tuned = {"enable_prefix_caching": False} if setting == "tuned" else {}
    llm = LLM(folder, dtype=dtype, max_model_len=512, max_num_seqs=32, **tuned)

    def generate(prompts, max_tokens):
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    serve(generate)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
