"""Dense models against logits and greedy tokens of Hugging Face transformers
(tests/golden/make_golden.py)."""

from __future__ import annotations

import numpy as np
import pytest
from paged_driver import GOLDEN, PagedDriver, check_against_golden, golden_prompts

from deepinfer_jax.models.loading import load_model

FIXTURES = sorted(
    p.parent.name
    for p in GOLDEN.glob("*/golden.npz")
    if p.parent.name.startswith(("llama", "qwen2", "qwen3_dense", "mistral"))
)


@pytest.mark.parametrize("name", FIXTURES)
def test_whole_prompts_then_decode(name: str) -> None:
    check_against_golden(name)


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 4), (7, 4), (16, 16), (33, 32)])
def test_chunked_prefill(chunk: int, block_size: int) -> None:
    check_against_golden("llama", chunk=chunk, block_size=block_size)


def test_a_prompt_alone_equals_the_batch() -> None:
    case = golden_prompts("llama")[2]
    driver = PagedDriver(load_model(GOLDEN / "llama", dtype="float32"))
    np.testing.assert_allclose(
        driver.prefill({5: case["prompt"]})[5], case["logits"], atol=2e-4, rtol=0
    )


def test_decode_logits_equal_prefill_logits() -> None:
    """Teacher-forced decode from an empty cache: every row's logits equal the reference's."""
    case = golden_prompts("llama")[1]
    driver = PagedDriver(load_model(GOLDEN / "llama", dtype="float32"))
    rows = [driver.decode({0: int(token)})[0] for token in case["prompt"]]
    np.testing.assert_allclose(np.stack(rows), case["logits"], atol=2e-4, rtol=0)
