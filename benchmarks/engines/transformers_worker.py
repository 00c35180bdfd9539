"""`transformers` generate as a benchmark worker: python transformers_worker.py
MODEL_FOLDER DTYPE SETTING

There is one setting: `generate` has no other that serves these requests."""

import sys

import torch
from transformers import AutoModelForCausalLM
from worker import serve


def main():
    folder, dtype = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts, max_tokens):
        """One static batch: prompts padded on the left, as many steps as the longest
        request wants."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(max_tokens),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [row[width : width + n] for row, n in zip(out.tolist(), max_tokens, strict=True)]

    serve(generate)


main()
