"""Model folders whose tokens and marks stand in different files; the expected encodings in
tests/golden/tokenizers.json are transformers' (tests/golden/make_tokenizers.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

TOOL = {
    "content": "<|tool|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}
PLAIN = {k: v for k, v in TOOL.items() if k != "special"}
BOS = {"bos_token": "<|im_start|>"}
BOTH = {**BOS, "eos_token": "<|im_end|>"}
TEXT = "a <|tool|>b<|x|>"
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "added_tokens_decoder": {"config": {**BOS, "added_tokens_decoder": {"258": TOOL}}},
    "its id elsewhere": {"config": {**BOS, "added_tokens_decoder": {"300": TOOL}}},
    "not special": {"config": {**BOS, "added_tokens_decoder": {"258": {**TOOL, "special": False}}}},
    "strips": {
        "config": {**BOS, "added_tokens_decoder": {"258": {**TOOL, "lstrip": True}}},
    },
    "made special there": {
        "config": {"added_tokens_decoder": {"256": {**TOOL, "content": "<|im_start|>"}}},
        "unmarked": ["<|im_start|>"],
        "text": "<|im_start|>a",
    },
    "made special by its name": {
        "config": BOTH,
        "unmarked": ["<|im_start|>", "<|im_end|>"],
        "text": "<|im_start|>a<|im_end|>",
    },
    "made special by its name, against its mark": {
        "config": {
            **BOS,
            "added_tokens_decoder": {"256": {**TOOL, "content": "<|im_start|>", "special": False}},
        },
        "text": "<|im_start|>a<|im_end|>",
    },
    "an extra keeps its mark": {
        "config": {"extra_special_tokens": ["<|im_end|>"]},
        "unmarked": ["<|im_start|>", "<|im_end|>"],
        "text": "<|im_start|>a<|im_end|>",
    },
    "added_tokens_decoder keeps added_tokens.json out": {
        "config": {**BOS, "added_tokens_decoder": {"258": TOOL}},
        "added_tokens": {"<|x|>": 259},
    },
    "added_tokens_decoder keeps special_tokens_map.json out": {
        "config": {**BOS, "added_tokens_decoder": {"258": TOOL}},
        "special_tokens_map": {"eos_token": "<|x|>"},
    },
    "special_tokens_map.json wins": {
        "config": {**BOS, "eos_token": "<|y|>"},
        "special_tokens_map": {"eos_token": "<|x|>", "bos_token": {**PLAIN, "lstrip": True}},
    },
    "added_tokens.json": {"config": BOS, "added_tokens": {"<|x|>": 259, "<|tool|>": 258}},
    "added_tokens.json, marked": {
        "config": {**BOS, "additional_special_tokens": ["<|tool|>"]},
        "added_tokens": {"<|tool|>": 258, "<|x|>": 259},
    },
    "extra_special_tokens": {"config": {**BOS, "extra_special_tokens": ["<|x|>", "<|tool|>"]}},
    "extra_special_tokens, named": {
        "config": {**BOS, "extra_special_tokens": {"tool_token": "<|tool|>"}}
    },
    "additional_special_tokens": {"config": {"additional_special_tokens": ["<|tool|>"]}},
    "a name of the model's own": {"config": {**BOS, "image_token": "<|tool|>"}},
    "a word of the vocabulary": {"config": {"bos_token": "a", "pad_token": "[PAD]"}},
    "no configuration": {"special_tokens_map": {"bos_token": "<|tool|>"}},
}
for _post in (False, True):
    for _add in (None, False, True):
        _flags = {} if _add is None else {"add_bos_token": _add, "add_eos_token": _add}
        CASES[f"bos {_post} {_add}"] = {"config": {**BOTH, **_flags}, "post": _post, "text": "a"}


def write(folder: Path, case: dict[str, Any]) -> None:
    """tokenizer.json (bytes are ids 0 to 255, two special tokens) and the other files of a case."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {p: i for i, p in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for text in ("<|im_start|>", "<|im_end|>"):
        special = text not in case.get("unmarked", ())
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    if case.get("post"):
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
        )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    files = {"config": "tokenizer_config", "added_tokens": "added_tokens"}
    for key, name in {**files, "special_tokens_map": "special_tokens_map"}.items():
        if key in case:
            (folder / f"{name}.json").write_text(json.dumps(case[key]))
