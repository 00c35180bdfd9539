"""`generate` through a real engine on a small checkpoint with reference tokens and no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax import cli

LLAMA = Path(__file__).parents[1] / "golden" / "llama"
ENGINE = [
    "--max-model-len",
    "128",
    "--max-num-seqs",
    "4",
    "--num-blocks",
    "64",
    "--max-num-batched-tokens",
    "128",
]


@pytest.fixture(scope="module")
def golden():
    return np.load(LLAMA / "golden.npz")


def test_generate_from_token_ids(golden, tmp_path, capsys):
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    lines = [
        {"prompt_token_ids": p, "id": i, "sampling_params": {"logprobs": 2}}
        for i, p in enumerate(prompts)
    ]
    lines.append({"prompt_token_ids": [3] * 200})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    argv = [
        "generate",
        "--model",
        str(LLAMA),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(out),
        "--max-tokens",
        "8",
        "--ignore-eos",
    ]
    assert cli.main([*argv, *ENGINE]) == 0
    *records, too_long = [json.loads(line) for line in out.read_text().splitlines()]
    for i, record in enumerate(records):
        completion = record["outputs"][0]
        assert completion["token_ids"] == golden[f"greedy_{i}"][:8].tolist()
        assert (record["id"], record["prompt_token_ids"], completion["finish_reason"]) == (
            i,
            prompts[i],
            "length",
        )
        assert [p[0]["token_id"] for p in completion["logprobs"]] == completion["token_ids"]
    assert too_long["outputs"][0] == {
        "text": "",
        "token_ids": [],
        "finish_reason": "prompt_length_exceeded",
        "stop_reason": None,
    }
    assert "in.jsonl:4: not completed: prompt_length_exceeded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "/nowhere", "--prompt", "x"], "no such model: /nowhere"),
        (["--model", str(LLAMA), "--prompt", "x"], "prompt 1: the model has no tokenizer"),
        (["--model", str(LLAMA), "--prompt", "x", "--dtype", "float8"], "unknown dtype 'float8'"),
        (
            ["--model", str(LLAMA), "--prompt", "x", "--max-model-len", "1000000"],
            "max_model_len must be in [2, ",
        ),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert cli.main(["generate", *argv, *(f for f in ENGINE if "--max-model-len" not in argv)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_token_id_outside_the_vocabulary_is_refused(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1, 99999]}')
    assert (
        cli.main(
            ["generate", "--model", str(LLAMA), "--input", str(tmp_path / "in.jsonl"), *ENGINE]
        )
        == 2
    )
    assert "token id 99999 at position 1 is outside the vocabulary" in capsys.readouterr().err
