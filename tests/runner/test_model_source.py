"""Where compiled programs are kept, and what happens where nothing can be kept."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from deepinfer_jax.models.gguf.cache import cached_folder
from deepinfer_jax.runner.model_source import use_compilation_cache

LLAMA = Path(__file__).parents[1] / "golden" / "llama"


@pytest.fixture
def no_cache_yet(monkeypatch):
    for name in ("DEEPINFER_CACHE_DIR", "DEEPINFER_JIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_compilation_cache_dir", None)
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_programs_are_kept_in_the_cache_folder(no_cache_yet, tmp_path):
    no_cache_yet.setenv("XDG_CACHE_HOME", "")
    no_cache_yet.setenv("HOME", str(tmp_path))
    use_compilation_cache()
    folder = tmp_path / ".cache" / "deepinfer-jax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(folder) and folder.is_dir()


def test_a_folder_that_cannot_be_made_is_a_warning_that_says_what_to_set(
    no_cache_yet, tmp_path, caplog
):
    (tmp_path / "file").write_text("")
    no_cache_yet.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept between starts" in caplog.text
    assert str(tmp_path / "file") in caplog.text and "DEEPINFER_CACHE_DIR" in caplog.text


def test_a_converted_model_without_a_folder_says_what_to_set(no_cache_yet, tmp_path):
    (tmp_path / "file").write_text("")
    no_cache_yet.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="no folder for the converted model: .*DEEPINFER_CACHE_DIR"):
        cached_folder("x", lambda folder: None)


def test_a_command_runs_without_any_home(tmp_path):
    """A user without an entry in the password file, HOME unset: nothing can be kept, all works."""
    code = (
        "import os, pwd\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "import sys; from deepinfer_jax import cli\n"
        f"sys.exit(cli.main(['generate', '--model', {str(LLAMA)!r}, '--input', 'in.jsonl',"
        " '--max-tokens', '2', '--max-model-len', '64', '--num-blocks', '8', '--json']))"
    )
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5, 6]}')
    names = ("HOME", "XDG_CACHE_HOME", "DEEPINFER_CACHE_DIR", "DEEPINFER_JIT_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment["DEEPINFER_CPU_NATIVE"] = "xla"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"finish_reason": "length"' in done.stdout
    assert "set DEEPINFER_CACHE_DIR" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
