"""DEEPINFER_ variables: parsed, refused, warned of, never written; each has a reader."""

from __future__ import annotations

import ast
import logging
import os
from dataclasses import fields
from pathlib import Path

import pytest

from deepinfer_jax import LLM, EngineArgs, EngineType, SamplingParams, environ
from deepinfer_jax.config import EngineConfig
from deepinfer_jax.runner.model_source import ModelSource

ROOT = Path(__file__).parents[2]
PRODUCT = ("deepinfer_jax", "scheduler", "models", "kernels_pallas", "launch")
MODEL = str(ROOT / "tests" / "golden" / "llama")
SMALL = {
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "num_blocks": 40,
    "prefill_buckets": (64,),
    "decode_buckets": (4,),
    "block_size": 8,
}


@pytest.fixture
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(environ.PREFIX):
            monkeypatch.delenv(name)
    return monkeypatch


def resolve(**changes) -> EngineConfig:
    args = EngineArgs(MODEL, **(SMALL | changes))
    return EngineConfig.resolve(args, ModelSource.find(args).config)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", False), ("0", False), ("false", False), ("False", False), ("1", True), ("yes", True)],
)
def test_booleans(clean, text, value):
    clean.setenv("DEEPINFER_ENFORCE_EAGER", text)
    assert environ.get("ENFORCE_EAGER", bool) is value


def test_values_defaults_and_malformed_ones(clean):
    assert environ.given("DECODE_TOKEN_BLACKLIST", tuple) is None
    assert environ.get("DECODE_TOKEN_BLACKLIST", tuple) == ()
    clean.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", "0..3,7")
    clean.setenv("DEEPINFER_NUM_STATE_SLOTS_RATIO", "0.5")
    clean.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "often")
    assert environ.get("DECODE_TOKEN_BLACKLIST", tuple) == (0, 1, 2, 3, 7)
    with pytest.raises(ValueError, match="DEEPINFER_LOGGING_INTERVAL_STEP='often'"):
        environ.get("LOGGING_INTERVAL_STEP", int)
    with pytest.raises(ValueError, match=r"NUM_STATE_SLOTS_RATIO='0.5': must be at least 1"):
        environ.get("NUM_STATE_SLOTS_RATIO", float)
    with pytest.raises(KeyError):
        environ.get("NO_SUCH_THING", str)


MISSING = [name for name, v in environ.VARIABLES.items() if v.missing is not None]


@pytest.mark.parametrize("name", MISSING)
def test_a_variable_of_a_missing_feature_is_refused_but_for_its_off_value(clean, name):
    variable = environ.VARIABLES[name]
    off = "0" if variable.default is False else str(variable.default)
    clean.setenv(environ.PREFIX + name, off)
    resolve()
    clean.setenv(environ.PREFIX + name, "7")
    message = f"{environ.PREFIX}{name}='7': {variable.missing} is not available yet"
    with pytest.raises(ValueError, match=message):
        resolve()


def test_an_unknown_variable_is_warned_of_once_with_the_nearest_name(clean, caplog):
    clean.setenv("DEEPINFER_PREFIL_ATTEMPT_INTERVAL", "3")
    clean.setattr(environ, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="deepinfer_jax.environ"):
        resolve()
        resolve()
    (record,) = caplog.records
    assert "DEEPINFER_PREFIL_ATTEMPT_INTERVAL is set" in record.getMessage()
    assert "did you mean DEEPINFER_PREFILL_ATTEMPT_INTERVAL?" in record.getMessage()


# ---- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "default"),
    [(EngineType.NORMAL, True), (EngineType.PROMPT, False), (EngineType.COMPLETION, True)],
)
def test_role_defaults_belong_to_the_engine_and_explicit_values_win(clean, role, default):
    before = dict(os.environ)
    changes = {"prefill_buckets": None} if role is EngineType.COMPLETION else {}
    assert resolve(engine_type=role, **changes).zos is default
    for text, value in (("1", True), ("0", False)):
        clean.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", text)
        assert resolve(engine_type=role, **changes).zos is value
        given = resolve(engine_type=role, zero_overhead_scheduling=not value, **changes)
        assert given.zos is not value
    clean.delenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING")
    assert dict(os.environ) == before


def test_a_normal_engine_after_a_deployment_of_both_roles(clean):
    before, tokens = dict(os.environ), []
    for options in ({"disaggregate": "1P:1D"}, {}):
        with LLM(MODEL, **SMALL, **options) as llm:
            out = llm.generate(prompt_token_ids=[[5, 6, 7]], use_tqdm=False)
            tokens.append(out[0].outputs[0].token_ids)
            engine = llm.engine
            if options:
                assert not engine.prompt_engines[0].config.zos
                assert engine.completion_engines[0].config.zos
            else:
                assert engine.config.zos
    assert tokens[0] == tokens[1]
    assert dict(os.environ) == before


# ---- what the variables do -----------------------------------------------------------------------


def test_force_top_k_blacklist_and_eager(clean):
    prompt = [[5, 6, 7, 8]]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
    hot = greedy.replace(temperature=5.0, seed=1)

    def tokens(params: SamplingParams) -> list[int]:
        with LLM(MODEL, **SMALL, warm_up=True) as llm:
            eager = not llm.engine.runner.programs.warm
            assert eager is environ.get("ENFORCE_EAGER", bool)
            out = llm.generate(prompt_token_ids=prompt, sampling_params=params, use_tqdm=False)
            return out[0].outputs[0].token_ids

    clean.setenv("DEEPINFER_ENFORCE_EAGER", "1")
    best = tokens(greedy)
    assert tokens(hot) != best
    clean.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "1")
    assert tokens(hot) == best
    clean.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", f"{best[0]}")
    for params in (greedy, hot.replace(logit_bias={best[0]: 50.0})):
        found = tokens(params)
        assert best[0] not in found and found[0] != best[0]
    clean.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", "100000")
    with pytest.raises(ValueError, match="token id 100000 is outside the vocabulary"):
        resolve()


def test_rows_of_per_sequence_caches(clean):
    assert resolve(max_num_seqs=10, decode_buckets=None).num_state_slots == 14
    clean.setenv("DEEPINFER_NUM_STATE_SLOTS_RATIO", "2")
    assert resolve(max_num_seqs=10, decode_buckets=None).num_state_slots == 22


# ---- nothing without a reader --------------------------------------------------------------------


def trees() -> dict[str, ast.Module]:
    files = [f for package in PRODUCT for f in (ROOT / package).rglob("*.py")]
    return {
        ".".join(f.relative_to(ROOT).with_suffix("").parts): ast.parse(f.read_text()) for f in files
    }


def attributes_read(tree: ast.AST) -> set[str]:
    return {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    }


def strings(tree: ast.AST) -> set[str]:
    return {
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def variables_read(tree: ast.AST) -> set[str]:
    """First arguments of environ.get and environ.given, and of what passes a name on to them."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args]
    return {
        a.value
        for c in calls
        for a in c.args
        if isinstance(a, ast.Constant)
        and ast.unparse(c.func) in ("environ.get", "environ.given", "_or_environment")
    }


def test_every_variable_has_a_reader_or_is_refused():
    modules = trees()
    del modules["deepinfer_jax.environ"]
    read = {name for tree in modules.values() for name in variables_read(tree)}
    for name, variable in environ.VARIABLES.items():
        if variable.missing is not None:
            assert name not in read, f"{name} is read and refused"
        elif variable.reader is not None:
            full = strings(modules[variable.reader])
            assert any(f"{environ.PREFIX}{name}" in text for text in full), name
        else:
            assert name in read, f"nothing reads {name}"
    assert read <= environ.VARIABLES.keys()


def test_every_argument_of_an_engine_has_a_reader():
    modules = trees()
    config = modules["deepinfer_jax.config"]
    inside = attributes_read(config)
    outside = {
        a
        for name, t in modules.items()
        if name != "deepinfer_jax.config"
        for a in attributes_read(t)
    }
    arguments = {f.name for f in fields(EngineArgs)}
    assert arguments - outside - inside == set()
    (schedulers,) = (
        n
        for n in ast.walk(config)
        if isinstance(n, ast.FunctionDef) and n.name == "scheduler_config"
    )
    decided = {f.name for f in fields(EngineConfig)}
    assert decided - outside - attributes_read(schedulers) == set()
