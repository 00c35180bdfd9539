"""Makes tests/golden/tokenizers.json: what transformers 5.24 makes of tests/helpers/
tokenizer_cases.py.

Run with a Python that has transformers:
PYTHONPATH=tests/helpers python tests/golden/make_tokenizers.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tokenizer_cases import CASES, TEXT, write
from transformers import AutoTokenizer


def main() -> None:
    expected = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), case)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            added = tokenizer.added_tokens_decoder
            ids = tokenizer.encode(case.get("text", TEXT))
            expected[name] = {
                "ids": ids,
                "shown": tokenizer.decode(ids, skip_special_tokens=True),
                "special_ids": [i for i, token in added.items() if token.special],
                "special_tokens": tokenizer.special_tokens_map,
            }
    text = json.dumps(expected, indent=1, ensure_ascii=False) + "\n"
    Path(__file__).with_name("tokenizers.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
