"""`deepinfer-jax serve`: flags that do not go together, files of keys, a real process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from engine_cases import GOLDEN

from deepinfer_jax.cli import main


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", *flags]) == 2
    return capsys.readouterr().err


def test_flags_that_do_not_go_together(capsys, tmp_path):
    assert "--model" in refused(capsys)
    assert "--router" in refused(capsys, "--model", "demo", "--secret-file", "x")
    router = ("--router", "127.0.0.1:1")
    error = refused(capsys, *router, "--max-model-len", "64", "--disaggregate", "1P:1D")
    assert "--max-model-len" in error and "--disaggregate" in error


def test_a_file_of_keys_is_nobody_elses(capsys, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one two\n")
    keys.chmod(0o644)
    flags = ("--model", str(GOLDEN / "llama"), "--api-key-file", str(keys))
    assert "0644" in refused(capsys, *flags)
    keys.chmod(0o600)
    keys.write_text(" \n")
    assert "no API key" in refused(capsys, *flags)


def test_a_process_serves_and_ends_at_sigterm(tmp_path):
    command = [sys.executable, "-m", "deepinfer_jax", "serve", "--model", str(GOLDEN / "llama")]
    sizes = ["--max-model-len", "64", "--max-num-seqs", "2", "--num-blocks", "20"]
    sizes += ["--max-num-batched-tokens", "64", "--decode-buckets", "2", "--prefill-buckets", "64"]
    process = subprocess.Popen(
        [*command, *sizes, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        lines = iter(process.stderr.readline, "")
        found = next(filter(None, (re.search(r"serving (\S+) on (http://\S+)", x) for x in lines)))
        assert found[1] == "llama"
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"{found[2]}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
