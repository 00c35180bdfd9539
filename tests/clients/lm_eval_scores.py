"""lm-eval's scores through the server, and those that LLM computes itself:
python lm_eval_scores.py PYTHON_WITH_LM_EVAL URL MODEL"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.models.resolve import resolve_model_path

QUESTIONS = (
    ("The capital of France is", (" Paris", " Rome", " Berlin"), 0),
    ("Water is made of hydrogen and", (" gold", " oxygen", " iron"), 1),
    ("The opposite of hot is", (" warm", " cold", " tall"), 1),
    ("Two plus two equals", (" seven", " nine", " four"), 2),
    ("The sun rises in the", (" east", " west", " north"), 0),
    ("A baby cat is called a", (" puppy", " kitten", " calf"), 1),
)


def through_the_server(python: str, url: str, model: str) -> list[list[float]]:
    folder = str(resolve_model_path(model))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        lines = [json.dumps({"q": q, "a": a, "y": y}) for q, a, y in QUESTIONS]
        (place / "d.jsonl").write_text("\n".join(lines))
        task = {
            "task": "mini",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(place / "d.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{a}}",
            "doc_to_target": "y",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
        (place / "mini.yaml").write_text(json.dumps(task))
        options = {
            "model": model,
            "base_url": f"{url}/v1/completions",
            "tokenizer": folder,
            "tokenizer_backend": "huggingface",
        }
        command = [python, "-m", "lm_eval", "--model", "local-completions", "--tasks", "mini"]
        command += ["--model_args", ",".join(f"{k}={v}" for k, v in options.items())]
        command += ["--include_path", scratch, "--log_samples", "--output_path", scratch]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": scratch}
        ran = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
        if ran.returncode:
            sys.exit((ran.stdout + ran.stderr)[-2000:])
        (samples,) = place.rglob("samples_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda r: r["doc_id"])
    return [[float(r[0]) for r in row["filtered_resps"]] for row in rows]


def by_the_engine(model: str) -> list[list[float]]:
    scores = []
    with LLM(model, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128) as llm:
        encode = llm.get_tokenizer().encode
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        for question, choices, _ in QUESTIONS:
            start, row = len(encode(question)), []
            for choice in choices:
                ids = encode(question + choice)
                (out,) = llm.generate([ids], params, use_tqdm=False)
                entries = zip(ids[start:], out.prompt_logprobs[start:], strict=True)
                row.append(sum(entry[token].logprob for token, entry in entries))
            scores.append(row)
    return scores


def main() -> None:
    served, own = through_the_server(*sys.argv[1:]), by_the_engine(sys.argv[3])
    accuracy = [
        sum(row.index(max(row)) == y for row, (_, _, y) in zip(rows, QUESTIONS, strict=True))
        for rows in (served, own)
    ]
    pairs = [p for rows in zip(served, own, strict=True) for p in zip(*rows, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    assert accuracy[0] == accuracy[1] and worst < 1e-3, (served, own)
    right = f"{accuracy[0]} of {len(QUESTIONS)} right both ways"
    print(f"{right}, log-likelihoods differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
