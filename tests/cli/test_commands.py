"""The commands with an LLM that answers by a rule: what they pass on, what they print, how they
refuse."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from fake_llm import FakeLLM

from deepinfer_jax import cli
from deepinfer_jax.cli import common
from deepinfer_jax.cli.speed import Stopwatch
from deepinfer_jax.sampling_params import RequestOutputKind


def run(*argv: str) -> int:
    return cli.main(list(argv))


def test_generate_applies_the_chat_template(llm, capsys):
    assert run("generate", "--model", "x", "--prompt", "hi", "--system", "s") == 0
    captured = capsys.readouterr()
    assert captured.out == "<SYSTEM>S<USER>HI<ASSISTANT>\n"
    assert "1 prompt, 28 tokens in" in captured.err and "tokens/s" in captured.err
    assert llm.closed
    assert (llm.calls[0].params[0].max_tokens, llm.calls[0].params[0].temperature) == (128, 0.0)


def test_generate_raw_and_several_prompts(llm, capsys):
    assert (
        run(
            "generate",
            "--model",
            "x",
            "--raw",
            "--prompt",
            "one",
            "--prompt",
            "two\nlines",
            "--progress",
        )
        == 0
    )
    captured = capsys.readouterr()
    assert captured.out == ">>> one\nONE\n\n>>> two lines\nTWO\nLINES\n\n"
    assert llm.prompts() == ["one", "two\nlines"] and "2/2" in captured.err


def test_a_model_without_a_chat_template_gets_raw_text(monkeypatch, capsys):
    monkeypatch.setattr(common, "build_llm", lambda args: FakeLLM(chat=False))
    assert run("generate", "--model", "x", "--prompt", "hi") == 0
    assert capsys.readouterr().out == "HI\n"


def test_generate_from_file_to_file(llm, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a", "id": 1, "sampling_params": {"max_tokens": 3, "stop": "z"}}\n'
        '{"messages": [{"role": "tool", "content": "b"}]}\n{"prompt_token_ids": [4, 5]}\n'
    )
    out = tmp_path / "out.jsonl"
    argv = [
        "generate",
        "--model",
        "x",
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(out),
        "--max-tokens",
        "9",
        "--top-k",
        "5",
    ]
    assert run(*argv) == 0
    assert llm.prompts()[:2] == ["<user>a<assistant>", "<tool>b<assistant>"] and llm.calls[0].ids[
        2
    ] == [4, 5]
    first, second, _ = llm.calls[0].params
    assert (first.max_tokens, first.stop, first.top_k) == (3, ("z",), 5) and (
        second.max_tokens,
        second.stop,
    ) == (9, ())
    assert {p.output_kind for p in llm.calls[0].params} == {RequestOutputKind.FINAL_ONLY}
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["index"] for r in records] == [0, 1, 2] and records[0]["id"] == 1
    assert records[0]["outputs"][0]["text"] == "<USER>A<ASSISTANT>"


def test_generate_text_output_and_json_on_stdout(llm, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a\nb\n")
    argv = ["generate", "--model", "x", "--raw", "--input", str(tmp_path / "in.txt")]
    assert run(*argv, "--output", str(tmp_path / "out.txt")) == 0
    assert (tmp_path / "out.txt").read_text() == "A\nB\n"
    assert run(*argv, "--json") == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == [
        "a",
        "b",
    ]


def test_generate_without_tokenizer_prints_token_ids(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(common, "build_llm", lambda args: FakeLLM(tokenizer=False))
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [4, 5]}')
    assert run("generate", "--model", "x", "--input", str(tmp_path / "in.jsonl")) == 0
    assert capsys.readouterr().out == "4 5\n"
    assert run("generate", "--model", "x", "--prompt", "hi") == 2
    assert "prompt 1: the model has no tokenizer" in capsys.readouterr().err


def test_a_single_prompt_streams_on_a_terminal(llm, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run("generate", "--model", "x", "--raw", "--prompt", "hi") == 0
    assert capsys.readouterr().out == "HI\n"
    assert llm.calls[0].params[0].output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--prompt", "x", "--temperature", "-1"],
            "temperature must be >= 0.0 and <= 1e+30, got -1.0",
        ),
        (
            ["--prompt", "x", "--max-tokens", "-1"],
            "max_tokens must be >= 0 and <= 2147483647, got -1",
        ),
        (
            ["--prompt", "x", "--output", "o.csv"],
            "--output must end in .txt or .jsonl, got 'o.csv'",
        ),
        (
            ["--prompt", "x", "--output", "/nowhere/o.txt"],
            "/nowhere/o.txt: No such file or directory",
        ),
        (["--input", "/nowhere/p.txt"], "/nowhere/p.txt: No such file or directory"),
        (["--prompt", "x", "--raw", "--system", "s"], "--system is part of the chat template"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(llm, capsys, argv, message):
    assert run("generate", "--model", "x", *argv) == 2
    error = capsys.readouterr().err
    assert (
        message in error and error.count("\n") == 1 and error.startswith("deepinfer-jax: error: ")
    )
    assert not llm.calls


def test_traceback_flag_shows_the_error_s_origin(llm):
    with pytest.raises(ValueError, match="temperature"):
        run("generate", "--model", "x", "--prompt", "x", "--temperature", "-1", "--traceback")


def test_a_bad_line_s_sampling_parameters_are_named(llm, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "sampling_params": {"top_p": 2}}')
    assert run("generate", "--model", "x", "--input", str(tmp_path / "in.jsonl")) == 2
    assert "in.jsonl:1: top_p must be >= 1e-30 and <= 1.0, got 2" in capsys.readouterr().err


def test_usage_errors(capsys):
    for argv in (
        [],
        ["generate"],
        ["generate", "--model", "x"],
        ["generate", "--model", "x", "--prompt", "a", "--input", "b"],
    ):
        try:
            code = run(*argv)
        except SystemExit as exit_:
            code = exit_.code
        assert code == 2
    with pytest.raises(SystemExit):
        run("genrate")
    assert (
        "unknown command 'genrate'; known: generate, chat, serve, info" in capsys.readouterr().err
    )


def test_speed_line_separates_the_compiler():
    watch = Stopwatch()
    watch.seconds, watch.compiling = 4.0, 0.1
    assert watch.report(1, 8) == "1 prompt, 8 tokens in 4.0 s: 2.0 tokens/s"
    watch.compiling = 3.0
    assert (
        watch.report(2, 8)
        == "2 prompts, 8 tokens in 4.0 s: 2.0 tokens/s (3.0 s of it compiling; 8.0 tokens/s"
        " without)"
    )
    with watch:
        jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((7,), "float32")).compile()
    assert 0 < watch.compiling <= watch.seconds


def chat(monkeypatch, llm, text: str, *argv: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert run("chat", "--model", "x", *argv) == 0


def test_chat_keeps_the_conversation(llm, monkeypatch, capsys):
    chat(monkeypatch, llm, "a\n\nb\n/reset\nc\n/exit\nd\n", "--system", "s")
    assert [llm.prompts(i)[0] for i in range(3)] == [
        "<system>s<user>a<assistant>",
        "<system>s<user>a<assistant><SYSTEM>S<USER>A<ASSISTANT><user>b<assistant>",
        "<system>s<user>c<assistant>",
    ]
    assert len(llm.calls) == 3 and llm.closed
    assert capsys.readouterr().out.splitlines()[0] == "<SYSTEM>S<USER>A<ASSISTANT>"


def test_chat_stopped_answer_stays_in_the_conversation(llm, monkeypatch, capsys):
    chat(monkeypatch, llm, "a!b\nc\n")
    assert llm.prompts(1) == ["<user>a!b<assistant><USER>A<user>c<assistant>"]
    assert "[stopped]" in capsys.readouterr().err


def test_chat_reports_a_refused_question_and_goes_on(llm, monkeypatch, capsys):
    def refuse(*, prompt_token_ids, sampling_params):
        raise ValueError("prompt too long")
        yield

    answer, llm.stream = llm.stream, refuse
    monkeypatch.setattr(
        "builtins.input", iter_input(["a", lambda: setattr(llm, "stream", answer) or "b"])
    )
    assert run("chat", "--model", "x") == 0
    assert "error: prompt too long" in capsys.readouterr().err
    assert llm.prompts(0) == ["<user>b<assistant>"]


def iter_input(lines):
    remaining = iter(lines)

    def read(_prompt):
        try:
            line = next(remaining)
        except StopIteration:
            raise EOFError from None
        return line() if callable(line) else line

    return read


def test_a_prompt_that_is_too_long_is_named(llm, monkeypatch, capsys):
    llm.reason = "prompt_length_exceeded"
    assert run("generate", "--model", "x", "--prompt", "a") == 0
    assert "prompt 1: not completed: prompt_length_exceeded" in capsys.readouterr().err
    chat(monkeypatch, llm, "a\nb\n")
    assert "longer than the engine's max_model_len" in capsys.readouterr().err
    assert llm.prompts(2) == ["<user>b<assistant>"]


def test_chat_needs_a_chat_template_and_one_completion(llm, monkeypatch, capsys):
    assert run("chat", "--model", "x", "--n", "2") == 2
    monkeypatch.setattr(common, "build_llm", lambda args: FakeLLM(chat=False))
    assert run("chat", "--model", "x") == 2
    error = capsys.readouterr().err
    assert "--n must be 1" in error and "x has no chat template; use `generate` with it" in error


def test_engine_flags_reach_the_llm():
    args = parsed("--max-num-seqs", "8", "--engine-type", "prompt", "--seed", "3", "--no-warm-up")
    assert common.engine_values(args) == {"max_num_seqs": 8, "engine_type": 1, "warm_up": False}
    assert common.sampling_values(args, {"n": 2}) == {"seed": 3, "n": 2}


def parsed(*argv: str):
    parser = argparse.ArgumentParser()
    common.add_sampling_flags(parser, {})
    common.add_engine_flags(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("command", [c.name for c in cli.COMMANDS])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(command, "--help")
    out = capsys.readouterr().out
    assert exit_.value.code == 0 and "--traceback" in out and f"deepinfer-jax {command}" in out


def test_info_lists_versions_and_devices(capsys):
    assert run("info", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["backend"] == "cpu" and found["versions"]["jax"]


def test_info_of_a_model(capsys, golden_llama):
    assert run("info", "--model", str(golden_llama), "--json", "--block-size", "8") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["class"] == "Llama"
    config = json.loads((golden_llama / "config.json").read_text())
    per_token = (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    )
    assert (
        found["caches"]["bytes_per_token"] == per_token
        and found["caches"]["bytes_per_block"] == 8 * per_token
    )
    assert run("info", "--model", str(golden_llama)) == 0
    assert "bytes_per_token" in capsys.readouterr().out


def test_info_of_no_model(capsys):
    assert run("info", "--model", "/nowhere") == 2
    assert "no such model: /nowhere" in capsys.readouterr().err


@pytest.fixture
def golden_llama():
    return Path(__file__).parents[1] / "golden" / "llama"


def test_the_module_runs_and_help_loads_no_jax():
    code = (
        "import sys; from deepinfer_jax.__main__ import main; main([]); print([m for m in"
        " sys.modules if m.startswith('jax')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "commands:" in out and out.strip().endswith("[]")
