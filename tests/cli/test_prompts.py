"""Prompt files in, result files out."""

from __future__ import annotations

import io
import json

import pytest
import tiny_tokenizers as tiny

from deepinfer_jax.cli.prompts import Prompt, read_prompts, write_results
from deepinfer_jax.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(
    tiny.byte_level(),
    chat_templates={"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"},
)


def write(tmp_path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path / name)


def test_text_file_one_prompt_per_line(tmp_path):
    path = write(tmp_path, "p.txt", "one\n\n  two \r\n日本\n")
    assert [(p.text, p.source) for p in read_prompts(path)] == [
        ("one", f"{path}:1"),
        ("  two ", f"{path}:3"),
        ("日本", f"{path}:4"),
    ]


def test_jsonl_file(tmp_path):
    lines = [
        '{"prompt": "a", "id": 7, "sampling_params": {"max_tokens": 3}}',
        '{"prompt_token_ids": [1, 2]}',
        '{"messages": [{"role": "user", "content": "x\u2028y"}]}',
        '"bare"',
    ]
    prompts = read_prompts(write(tmp_path, "p.jsonl", "\n".join(lines)))
    assert (prompts[0].id, prompts[0].sampling) == (7, {"max_tokens": 3})
    assert prompts[1].token_ids == [1, 2]
    assert prompts[2].messages == [{"role": "user", "content": "x\u2028y"}]
    assert prompts[3].text == "bare"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("3", "must be an object or a string"),
        ("{}", "exactly one of prompt, prompt_token_ids and messages, got none"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": "a", "temprature": 1}', r"unknown keys \['temprature'\]"),
        ('{"prompt": 1}', "prompt must be a string"),
        ('{"prompt_token_ids": [1.5]}', "list of integers"),
        ('{"prompt_token_ids": "1"}', "list of integers"),
        ('{"messages": {}}', "messages must be a list"),
        ('{"prompt": "a", "sampling_params": []}', "sampling_params must be an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert f"{path}:2" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "x", r"\.txt .* or \.jsonl"),
        ("p", "x", "no suffix"),
        ("p.txt", " \n", "no prompts"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path, name, text))


def test_not_utf8(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(str(tmp_path / "p.txt"))


def text_of(prompt: Prompt, **options) -> str:
    return TOKENIZER.decode(prompt.tokenize(TOKENIZER, **options), skip_special_tokens=False)


def test_tokenizing():
    messages = [{"role": "user", "content": "m"}]
    assert text_of(Prompt("p", text="t"), chat=False) == "t"
    assert text_of(Prompt("p", text="t"), chat=True) == "<user>t"
    assert text_of(Prompt("p", text="t"), chat=True, system="s") == "<system>s<user>t"
    assert text_of(Prompt("p", messages=messages), chat=False, system="s") == "<user>m"
    assert Prompt("p", token_ids=[5]).tokenize(None, chat=True) == [5]
    with pytest.raises(ValueError, match="p: the model has no tokenizer"):
        Prompt("p", text="t").tokenize(None, chat=False)
    with pytest.raises(ValueError, match=r"p: messages\[0\]"):
        Prompt("p", messages=[1]).tokenize(TOKENIZER, chat=True)


def output(text: str, **kwargs) -> RequestOutput:
    completion = CompletionOutput(0, text, [4, 5], finish_reason="stop", stop_reason="x", **kwargs)
    return RequestOutput("r0", None, [1], outputs=[completion], finished=True)


def test_results_as_text_have_one_line_per_prompt():
    stream = io.StringIO()
    write_results(
        stream, [Prompt("a", text="q")] * 2, [output("one\ntwo"), output("C:\\n")], as_json=False
    )
    assert stream.getvalue() == "one\\ntwo\nC:\\\\n\n"


def test_results_as_json():
    stream = io.StringIO()
    logprobs = [{4: Logprob(-0.5, 1, "é")}, {5: Logprob(-1.0, 2, None)}]
    write_results(
        stream,
        [Prompt("a", text="q", id="k"), Prompt("b", token_ids=[1])],
        [output("t", logprobs=logprobs, cumulative_logprob=-1.5), output("u")],
        as_json=True,
    )
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == {
        "index": 0,
        "request_id": "r0",
        "id": "k",
        "prompt": "q",
        "prompt_token_ids": [1],
        "outputs": [
            {
                "text": "t",
                "token_ids": [4, 5],
                "finish_reason": "stop",
                "stop_reason": "x",
                "cumulative_logprob": -1.5,
                "logprobs": [
                    [{"token_id": 4, "logprob": -0.5, "rank": 1, "token": "é"}],
                    [{"token_id": 5, "logprob": -1.0, "rank": 2, "token": None}],
                ],
            }
        ],
    }
    assert "prompt" not in second and second["index"] == 1
