"""Warm-up: progress, restarts from the persistent cache, and what happens to a compile that comes
later."""

import json
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from engine_cases import GREEDY, SMALL, Golden, small_llm

from deepinfer_jax import EngineArgs, LLMEngine
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.programs import CompileAfterWarmUp

LLAMA = Golden("llama")
QUICK = {"enable_penalties": False, "max_logprobs": 1, "compilation_cache": False}


@pytest.fixture(scope="module")
def warm():
    with small_llm(warm_up=True, strict_compiles=True, **QUICK) as llm:
        yield llm


def test_every_program_is_reported_once_as_it_gets_ready():
    seen = []
    engine = LLMEngine(
        EngineArgs(LLAMA.path, **(SMALL | QUICK)), warm_up_progress=lambda *call: seen.append(call)
    )
    names, done, counts = zip(*seen, strict=True)
    assert sorted(names) == sorted(map(str, engine.runner.programs.warm_up_keys())) and len(
        set(names)
    ) == len(names)
    assert done == tuple(range(1, len(seen) + 1)) and set(counts) == {len(seen)}
    assert engine.stats()["warm_up_seconds"] > 0
    engine.close()


def test_llm_shows_a_bar_on_stderr(capfd):
    with small_llm(warm_up=True, **QUICK):
        pass
    out, err = capfd.readouterr()
    assert "compiling" in err and "7/7" in err and not out


def test_nothing_compiles_after_warm_up(warm):
    """Not even outside the step programs: the counter sees every compilation of the process."""
    before = warm.stats()
    prompts = [*LLAMA.prompts, LLAMA.prompts[0] * 5]
    params = [GREEDY.replace(max_tokens=n) for n in (1, 7, 30, 12, 5, 9)]
    for shuffled in (prompts, prompts[::-1]):
        warm.generate(
            prompt_token_ids=shuffled, sampling_params=params[: len(prompts)], use_tqdm=False
        )
    for name in ("compiles_after_warm_up", "xla_compiles_after_warm_up"):
        assert warm.stats()[name] == before[name], compile_watch().recent


def test_a_program_missed_by_warm_up_raises_when_strict(warm):
    before = warm.stats()["compiles_after_warm_up"]
    with pytest.raises(CompileAfterWarmUp, match=r"decode\[3\].*compiled: .*decode\[8\]"):
        warm.engine.runner.programs.get(ProgramKey("decode", 3))
    assert warm.stats()["compiles_after_warm_up"] == before + 1
    warm.engine.runner.programs.compiles_after_warm_up = 0


def test_a_program_missed_by_warm_up_warns_with_its_shape_otherwise(caplog):
    with (
        small_llm(warm_up=True, **QUICK) as llm,
        caplog.at_level(logging.WARNING, logger="deepinfer_jax"),
    ):
        llm.engine.runner.programs.get(ProgramKey("decode", 3))
        assert "decode[3]" in caplog.text
        stats = llm.stats()
        assert stats["compiles_after_warm_up"] == stats["xla_compiles_after_warm_up"] == 1


def test_any_compilation_of_the_process_is_counted(warm):
    before = warm.stats()["xla_compiles_after_warm_up"]
    x = jnp.arange(7.0)
    start = warm.stats()["xla_compiles_after_warm_up"]
    jax.jit(lambda a: a * 3 + before)(x).block_until_ready()
    assert warm.stats()["xla_compiles_after_warm_up"] == start + 1
    with compile_watch().expected():
        jax.jit(lambda a: a * 5 + before)(x).block_until_ready()
    assert warm.stats()["xla_compiles_after_warm_up"] == start + 1


def test_lazy_compiles_are_expected():
    with small_llm(**QUICK) as llm:
        llm.generate(prompt_token_ids=LLAMA.prompts[:2], sampling_params=GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert stats["xla_compiles_after_warm_up"] == stats["compiles_after_warm_up"] == 0


PROCESS = """
import json, sys
from deepinfer_jax import EngineArgs, LLMEngine
from deepinfer_jax.runner.compile_watch import compile_watch
watch = compile_watch()
engine = LLMEngine(EngineArgs(**json.loads(sys.argv[1])))
programs = len(engine.runner.programs.warm_up_keys())
print(json.dumps({"programs": programs, "compiles": watch.compiles, "hits": watch.cache_hits}))
"""


def test_a_restart_finds_every_program_in_the_persistent_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    args = json.dumps({"model": LLAMA.path, **SMALL, "enable_penalties": False, "max_logprobs": 1})

    def start():
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, args], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    first, second = start(), start()
    assert first["compiles"] - first["hits"] >= first["programs"]
    assert second["compiles"] == second["hits"] >= second["programs"], (
        "a restart compiled something"
    )
