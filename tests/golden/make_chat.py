"""Makes tests/golden/chat.json: what transformers 5.24 renders of tests/helpers/chat_cases.py.

Run with a Python that has transformers: PYTHONPATH=tests/helpers python tests/golden/make_chat.py
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from chat_cases import FUNCTIONS, RENDERINGS
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema


def rendered(template: str, messages: list, **options) -> str:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )


def main() -> None:
    expected = {
        "schemas": {f.__name__: get_json_schema(f) for f in FUNCTIONS},
        "texts": {name: rendered(**case) for name, case in RENDERINGS.items()},
    }
    text = json.dumps(expected, indent=1, ensure_ascii=False) + "\n"
    Path(__file__).with_name("chat.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
