"""Result files: what a run that ends, is interrupted, fails or is continued leaves on disk."""

from __future__ import annotations

import json

import pytest
from fake_llm import FakeLLM

from deepinfer_jax import cli
from deepinfer_jax.cli import common

BASE = ["generate", "--model", "x", "--raw"]


def run(*argv: str) -> int:
    return cli.main(list(argv))


@pytest.fixture
def files(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "id": f"id {text}"}) + "\n" for text in "abcd")
    )
    return tmp_path


def argv(files, *more: str, out: str = "out.jsonl") -> list[str]:
    return [*BASE, "--input", str(files / "in.jsonl"), "--output", str(files / out), *more]


def results(path) -> list[tuple[str, str]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(r["id"], r["outputs"][0]["text"]) for r in records]


ALL = [(f"id {c}", c.upper()) for c in "abcd"]


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_run_is_in_the_order_of_the_prompts_and_leaves_nothing_else(llm, files):
    assert run(*argv(files)) == 0  # the last prompt finishes first
    assert results(files / "out.jsonl") == ALL and names(files) == {"in.jsonl", "out.jsonl"}


def test_an_older_file_stays_until_the_run_has_succeeded(llm, files, monkeypatch, capsys):
    out = files / "out.jsonl"
    out.write_text('{"precious": 1}\n')
    out.chmod(0o640)

    def no_such_model(args):
        assert out.read_text() == '{"precious": 1}\n'
        raise ValueError("no such model: x")

    with monkeypatch.context() as patch:
        patch.setattr(common, "build_llm", no_such_model)
        assert run(*argv(files)) == 2
    assert out.read_text() == '{"precious": 1}\n' and names(files) == {"in.jsonl", "out.jsonl"}
    llm.stops_before = 0
    llm.stops_with = ValueError("the device is gone")
    assert run(*argv(files)) == 2
    assert out.read_text() == '{"precious": 1}\n'
    assert f"3 of 4 results are in {out}.partial; --resume" in capsys.readouterr().err
    assert run(*argv(files)) == 2  # not thrown away by mistake either
    assert "holds results of a run that did not end" in capsys.readouterr().err
    llm.stops_before = None
    assert run(*argv(files, "--resume")) == 0
    assert len(llm.calls[-1].ids) == 1 and llm.prompts(-1) == ["a"]
    assert results(out) == ALL and names(files) == {"in.jsonl", "out.jsonl"}
    assert out.stat().st_mode & 0o777 == 0o640


def test_results_are_on_disk_as_requests_finish(llm, files):
    seen = []
    finished = llm._finished

    def watch(ids, params):
        for output in finished(ids, params):
            yield output
            seen.append(len((files / "out.jsonl.partial").read_text().splitlines()))

    llm._finished = watch
    assert run(*argv(files)) == 0
    assert seen == [1, 2, 3, 4]


def test_an_interrupted_run_keeps_what_is_done_and_says_where(llm, files, capsys):
    llm.stops_before = 1
    assert run(*argv(files)) == 130
    out = files / "out.jsonl"
    assert results(out) == ALL[:1:-1] and names(files) == {"in.jsonl", "out.jsonl"}
    error = capsys.readouterr().err
    assert f"2 of 4 results are in {out}; --resume continues from there" in error
    assert "interrupted" in error
    llm.stops_before = 0
    assert run(*argv(files, "--resume")) == 130
    assert llm.prompts(-1) == ["a", "b"] and results(out) == [ALL[3], ALL[2], ALL[1]]
    llm.stops_before = None
    assert run(*argv(files, "--resume")) == 0
    assert llm.prompts(-1) == ["a"] and results(out) == ALL
    calls = len(llm.calls)
    assert run(*argv(files, "--resume")) == 0 and len(llm.calls) == calls  # nothing left to do


def test_an_interrupted_run_without_results_leaves_no_file(llm, files):
    llm.stops_before = 3
    assert run(*argv(files)) == 130 and names(files) == {"in.jsonl"}


def test_an_interrupted_text_file_has_an_empty_line_for_what_is_missing(llm, files):
    llm.stops_before = 1
    assert run(*argv(files, out="out.txt")) == 130
    assert (files / "out.txt").read_text() == "\n\nC\nD\n"
    llm.stops_before = None
    assert run(*argv(files, out="out.txt")) == 0
    assert (files / "out.txt").read_text() == "A\nB\nC\nD\n"


def test_resume_cuts_a_torn_line_and_repeats_what_was_not_completed(llm, files):
    assert run(*argv(files)) == 0
    out = files / "out.jsonl"
    lines = out.read_text().splitlines()
    lines[1] = lines[1].replace('"length"', '"error"')
    out.write_text("\n".join(lines)[:-20])  # killed while writing the last one
    assert run(*argv(files, "--resume")) == 0
    assert llm.prompts(-1) == ["b", "d"] and results(out) == ALL


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"precious": 1}', "out.jsonl:1: not a result of `generate`"),
        ("torn in the middle", "out.jsonl:1: not JSON"),
        (
            '{"index": 0, "id": "z", "outputs": [{"finish_reason": "stop"}]}',
            "the result with id 'z'",
        ),
        (
            '{"index": 0, "id": "id a", "prompt": "other", "outputs": [{"finish_reason": "stop"}]}',
            "the result with id 'id a' does not belong to this input",
        ),
    ],
)
def test_resume_refuses_a_file_of_another_run(llm, files, capsys, line, message):
    out = files / "out.jsonl"
    out.write_text(line + "\n")
    assert run(*argv(files, "--resume")) == 2
    assert message in capsys.readouterr().err
    assert out.read_text() == line + "\n" and not llm.calls


def test_resume_without_ids_goes_by_position_and_checks_the_prompt(llm, files, capsys):
    (files / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt_token_ids": [4, 5]}\n"c"\n')
    llm.stops_before = 0
    assert run(*argv(files)) == 130
    llm.stops_before = None
    (files / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt_token_ids": [4, 6]}\n"c"\n')
    assert run(*argv(files, "--resume")) == 2
    assert "the result with index 1 does not belong to this input" in capsys.readouterr().err
    (files / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt_token_ids": [4, 5]}\n"c"\n')
    assert run(*argv(files, "--resume")) == 0
    assert llm.prompts(-1) == ["a"]


@pytest.mark.parametrize(
    ("more", "out", "message"),
    [
        (["--resume"], "out.txt", "--resume continues an --output file that ends in .jsonl"),
        ([], "in.jsonl", "is the input file itself"),
        ([], "", "--output must end in"),
    ],
)
def test_outputs_that_cannot_be(llm, files, capsys, more, out, message):
    before = (files / "in.jsonl").read_text()
    assert run(*argv(files, *more, out=out)) == 2
    assert message in capsys.readouterr().err
    assert (files / "in.jsonl").read_text() == before and not llm.calls


def test_a_folder_is_no_output_and_a_link_stays_a_link(llm, files, capsys):
    (files / "folder.jsonl").mkdir()
    assert run(*argv(files, out="folder.jsonl")) == 2
    assert "folder.jsonl: is a folder" in capsys.readouterr().err
    (files / "real.jsonl").write_text("")
    (files / "link.jsonl").symlink_to(files / "real.jsonl")
    assert run(*argv(files, out="link.jsonl")) == 0
    assert (files / "link.jsonl").is_symlink() and results(files / "real.jsonl") == ALL


def test_a_device_takes_lines_but_is_never_replaced(llm, files):
    (files / "null.jsonl").symlink_to("/dev/null")
    assert run(*argv(files, out="null.jsonl")) == 0
    assert (files / "null.jsonl").is_symlink()


def test_results_on_stdout_survive_an_interrupt_too(llm, files, capsys):
    llm.stops_before = 1
    assert run(*BASE, "--input", str(files / "in.jsonl"), "--json") == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["index"] for line in lines] == [2, 3]


def test_prompts_and_system_messages_that_are_no_text_are_refused(llm, capsys):
    assert run(*BASE, "--prompt", "ok", "--prompt", "caf\udce9") == 2
    assert "prompt 2: the text has half a surrogate pair" in capsys.readouterr().err
    assert run("generate", "--model", "x", "--prompt", "ok", "--system", "\ud83d") == 2
    assert "--system: the text has half a surrogate pair" in capsys.readouterr().err
    assert not llm.calls


def test_a_request_that_the_engine_refuses_is_named_by_its_line(files, monkeypatch, capsys):
    from deepinfer_jax.llm import InvalidPrompt

    class Refusing(FakeLLM):
        def generate_as_finished(self, **kwargs):
            raise InvalidPrompt(2, "request '0-2': token id 9 is outside the vocabulary [0, 8)")

    monkeypatch.setattr(common, "build_llm", lambda args: Refusing())
    assert run(*argv(files)) == 2
    error = capsys.readouterr().err
    assert "in.jsonl:3: request '0-2': token id 9" in error and names(files) == {"in.jsonl"}
