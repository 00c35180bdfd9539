"""270 tokens against Hugging Face, whole and cut anywhere: cuts in front of, at and behind 128
tokens, inside windows and inside unfinished entries; then decode steps of all of them together.

The fixtures are made by tests/golden/make_golden_long.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paged_driver import PagedDriver

from deepinfer_jax.models.loading import load_model

GOLDEN = Path(__file__).parents[2] / "golden"
CUTS = (5, 32, 37, 127, 129, 270)
TOLERANCE = 3e-4


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_every_cut_gives_the_reference(name):
    """One sequence per cut: its prompt alone in each step, its new tokens beside the others'."""
    case = np.load(GOLDEN / name / "long.npz")
    prompt, length = case["prompt"], len(case["prompt"])
    model = load_model(GOLDEN / name, dtype="float32")
    driver = PagedDriver(model, block_size=16, num_blocks=128, pages=20)
    tokens = {}
    for cut in CUTS:
        least = 288 if cut == length else 144
        parts = [
            driver.prefill({cut: prompt[at : at + cut]}, least)[cut] for at in range(0, length, cut)
        ]
        logits = np.concatenate(parts)[case["rows"]]
        np.testing.assert_allclose(logits, case["logits"], atol=TOLERANCE, err_msg=f"cut {cut}")
        tokens[cut] = int(parts[-1][-1].argmax())
    assert case["margin"].min() > 2 * TOLERANCE
    for expected in case["greedy"]:
        assert tokens == dict.fromkeys(CUTS, expected)
        tokens = {cut: int(row.argmax()) for cut, row in driver.decode(tokens).items()}
