"""What several engine tests need: golden cases, small engines and how to run requests
through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"
SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_blocks": 80,
    "prefill_buckets": (256,),
    "decode_buckets": (8,),
    "max_logprobs": 5,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Golden:
    """A tiny checkpoint with prompts, teacher-forced logits and greedy continuations from a
    reference implementation."""

    def __init__(self, name: str) -> None:
        self.path = str(GOLDEN / name)
        data = np.load(GOLDEN / name / "golden.npz")
        count = sum(key.startswith("prompt_") for key in data)
        self.prompts = [data[f"prompt_{i}"].tolist() for i in range(count)]
        self.greedy = [data[f"greedy_{i}"].tolist() for i in range(count)]
        self.logits = [data[f"logits_{i}"] for i in range(count)]

    def log_softmax(self, i: int) -> np.ndarray:
        """float64 [len, vocab] of prompt i."""
        x = self.logits[i].astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))


def small_llm(name: str = "llama", **changes: Any) -> LLM:
    return LLM(str(GOLDEN / name), **(SMALL | changes))


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    """Token ids per prompt; checks that nothing leaked."""
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    llm.engine.check_integrity()
    assert all(s.cache_usage == 0 for s in llm.engine.schedulers)
    return [o.outputs[0].token_ids for o in outputs]
