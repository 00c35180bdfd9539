"""`deepinfer-jax simulate`: table, JSON, plot, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deepinfer_jax import cli

RANDOM = ["--rate", "20", "--input-mean", "300", "--output-mean", "20", "--limit", "30"]


def run(*argv: str) -> int:
    return cli.main(["simulate", *argv])


def test_compares_deployments_in_a_table(capsys):
    assert run(*RANDOM, "--deployment", "normal:dp=2", "pd:1P:1D") == 0
    out = capsys.readouterr().out
    assert "30 requests" in out and "roofline of 8.03e9 parameters" in out
    for text in ("normal:dp=2  pd:1P:1D", "TTFT p99 ms", "ITL p50 ms", "COMPLETION_0"):
        assert text in out


def test_json_and_files(capsys, tmp_path):
    trace, costs = tmp_path / "t.csv", tmp_path / "c.json"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,11\n9,100,11\n")
    tables = {
        "prefill": {"tokens": [1], "seconds": [0.5]},
        "decode": {"rows": [1], "seconds": [0.1]},
    }
    costs.write_text(json.dumps({"format": "deepinfer-step-costs/1", **tables}))
    assert (
        run(
            "--trace",
            str(trace),
            "--costs",
            str(costs),
            "--speed",
            "3",
            "--max-tokens",
            "20",
            "--deployment",
            "normal",
            "--json",
        )
        == 0
    )
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["ttft_seconds"]["max"], result["itl_seconds"]["p50"]) == (
        2,
        0.5,
        pytest.approx(0.1),
    )
    assert result["seconds"] == pytest.approx(3 + 1.5)


def test_plot(tmp_path, capsys):
    path = tmp_path / "out.png"
    assert run(*RANDOM, "--deployment", "normal:2", "pd:1P:1D", "--plot", str(path)) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and str(path) in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "deepinfer_jax.cli.simulate_plot", raising=False)
    assert run(*RANDOM, "--deployment", "normal", "--plot", "x.png") == 2
    assert "plots need matplotlib: pip install 'deepinfer-jax[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "give --trace FILE, or all of --rate, --input-mean and --output-mean"),
        (["--rate", "3"], "give --trace FILE, or all of"),
        (["--trace", "missing.csv"], "missing.csv: No such file or directory"),
        (["--trace", "x.csv", "--rate", "3"], "--rate would have no effect"),
        ([*RANDOM, "--costs", "missing.json"], "missing.json: No such file or directory"),
        (
            [*RANDOM, "--costs", "c.json", "--peak-flops", "1e12"],
            "--peak-flops would have no effect",
        ),
        ([*RANDOM, "--num-blocks", "0"], "deployment 'normal': num_blocks must be >= 1, got 0"),
        ([*RANDOM, "--limit", "0"], "--limit must be >= 1, got 0"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert run(*argv, "--deployment", "normal") == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_needs_no_jax():
    code = (
        "import sys; from deepinfer_jax import cli; cli.main(sys.argv[1:]); assert 'jax' not in"
        " sys.modules"
    )
    argv = ["simulate", *RANDOM, "--deployment", "pd:1P:1D", "--json"]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True, timeout=60)


def test_json_is_json_where_there_is_nothing_to_measure(capsys):
    """One output token per request: no gap between tokens, so no inter-token latency."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    argv = ["--rate", "20", "--input-mean", "30", "--output-mean", "1", "--output-cv", "0"]
    assert run(*argv, "--limit", "5", "--deployment", "normal", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert result["itl_seconds"]["p50"] is None
