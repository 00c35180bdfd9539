"""Write long prompts for checkpoints that make_golden.py wrote: prompts with cuts at 127, 128 and
129 tokens and beyond.

Usage: python make_golden_long.py OUT_DIR NAME...      needs what make_golden.py needs
Reads OUT_DIR/NAME/, writes OUT_DIR/NAME/long.npz: prompt int32 [len], rows int32 [R] (positions),
logits float32 [R, vocab] at `rows`, greedy int32 [new] and margin float32 [new] as there.
"""

import os
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

LENGTH, NEW = 270, 8
ROWS = sorted(
    {r for cut in (5, 32, 37, 127, 129, 254, 258) for r in range(cut - 2, cut + 2)}
    | set(range(0, LENGTH, 15))
    | {LENGTH - 1}
)


def make_long(path, seed=200):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, model.config.vocab_size, (1, LENGTH), generator=generator)
    sequence, margin = prompt, []
    with torch.no_grad():
        logits = model(prompt, use_cache=False).logits[0]
        for _ in range(NEW):
            top = model(sequence, use_cache=False).logits[0, -1].topk(2)
            margin.append((top.values[0] - top.values[1]).item())
            sequence = torch.cat([sequence, top.indices[:1][None]], 1)
    np.savez_compressed(
        os.path.join(path, "long.npz"),
        prompt=prompt[0].numpy().astype(np.int32),
        rows=np.asarray(ROWS, np.int32),
        logits=logits[ROWS].numpy(),
        greedy=sequence[0, LENGTH:].numpy().astype(np.int32),
        margin=np.asarray(margin, np.float32),
    )
    print(path, "smallest margin", min(margin))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make_long(os.path.join(sys.argv[1], name))
