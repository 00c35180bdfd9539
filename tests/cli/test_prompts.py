"""Prompt files in, result files out."""

from __future__ import annotations

import json
import math

import pytest
import tiny_tokenizers as tiny

from deepinfer_jax.cli.prompts import Prompt, read_prompts
from deepinfer_jax.cli.results import result_line
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
        ('{"prompt_token_ids": [true]}', "list of integers"),
        ('{"prompt_token_ids": []}', "prompt_token_ids is empty"),
        ('{"prompt_token_ids": [-1]}', "token id -1 is outside"),
        ('{"prompt_token_ids": [4294967297]}', "token id 4294967297 is outside"),
        ('{"messages": {}}', "messages must be a list"),
        ('{"messages": []}', "messages must be a list of at least one"),
        ('{"messages": ["hello"]}', r"messages\[0\] must be an object with a role, got 'hello'"),
        ('{"messages": [{"content": "x"}]}', r"messages\[0\] must be an object with a role"),
        ('{"prompt": "a", "id": [1]}', r"id must be a string or an integer, got \[1\]"),
        ('{"prompt": "a", "id": true}', "id must be a string or an integer, got True"),
        ('{"prompt": "a", "id": 1.5}', "id must be a string or an integer"),
        ('{"prompt": NaN}', "NaN is no JSON number"),
        ('{"prompt": "a", "sampling_params": {"temperature": Infinity}}', "Infinity is no JSON"),
        ('{"prompt": "a", "sampling_params": {"temperature": 1e999}}', "1e999 is outside"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is given twice"),
        (r'{"prompt": "cut \ud83d"}', r"half a surrogate pair, \\ud83d, at character 4"),
        (r'{"messages": [{"role": "user", "content": ["\udc00"]}]}', "half a surrogate pair"),
        (r'{"prompt": "fine", "id": "cut \ud83d"}', "half a surrogate pair"),
        (r'{"prompt": "fine", "\ud83d": 1}', "half a surrogate pair"),
        ('{"messages": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64"),
        ('{"messages": ' + "[" * 100_000, "nested deeper than 64"),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "has 5000 digits"),
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


def test_not_utf8_names_the_line(tmp_path):
    (tmp_path / "p.txt").write_bytes("é\nfine\n".encode() + b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"p\.txt:3: not UTF-8"):
        read_prompts(str(tmp_path / "p.txt"))


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello\r\nWorld\r\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "Hello"}\n{"prompt": "World"}\n')
    for name in ("a.txt", "a.jsonl"):
        prompts = read_prompts(str(tmp_path / name))
        assert [p.text for p in prompts] == ["Hello", "World"]
        assert prompts[1].source.endswith(f"{name}:2")


def test_an_id_given_twice_names_both_lines(tmp_path):
    lines = ['{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": 1}', '{"prompt": "c", "id": "x"}']
    path = write(tmp_path, "p.jsonl", "\n".join(lines))
    with pytest.raises(ValueError, match=r"p\.jsonl:3: the id 'x' is that of .*p\.jsonl:1 too"):
        read_prompts(path)


def test_json_results_are_json_even_where_numbers_are_not(tmp_path):
    logprobs = [{4: Logprob(-math.inf, 1, "x")}]
    made = output("t", logprobs=logprobs, cumulative_logprob=math.nan)
    line = result_line(0, Prompt("a", text="q"), made, as_json=True)

    def refuse(name: str) -> float:
        raise AssertionError(name)

    (completion,) = json.loads(line, parse_constant=refuse)["outputs"]
    assert completion["cumulative_logprob"] is None
    assert completion["logprobs"][0][0]["logprob"] is None


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
    prompt = Prompt("a", text="q")
    lines = [result_line(0, prompt, output(text), as_json=False) for text in ("one\ntwo", "C:\\n")]
    assert lines == ["one\\ntwo", "C:\\\\n"]


def test_results_as_json():
    logprobs = [{4: Logprob(-0.5, 1, "é")}, {5: Logprob(-1.0, 2, None)}]
    lines = [
        result_line(
            0,
            Prompt("a", text="q", id="k"),
            output("t", logprobs=logprobs, cumulative_logprob=-1.5),
            as_json=True,
        ),
        result_line(1, Prompt("b", token_ids=[1]), output("u"), as_json=True),
    ]
    assert not any("\n" in line for line in lines)
    first, second = map(json.loads, lines)
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
