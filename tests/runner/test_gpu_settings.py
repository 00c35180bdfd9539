"""What the CUDA client and XLA are told, without a GPU: the environment's variables, options of
programs, and one budget for engine and plan."""

from __future__ import annotations

import logging
import os

import pytest

from deepinfer_jax.runner import gpu_settings
from deepinfer_jax.runner.gpu_settings import (
    FLAGS,
    MEMORY_FRACTION,
    budget_bytes,
    compiler_options,
    memory_fraction,
    reserve_memory,
)

POOL = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


@pytest.fixture
def fresh(monkeypatch):
    """A process with the CUDA plugin whose backend has not started."""
    for name in POOL:
        # set, so that it is restored, then deleted
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpu_settings.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_settings, "_started", lambda: False)
    return monkeypatch


def test_the_client_gets_its_share_before_the_backend_starts(fresh):
    assert memory_fraction() == 0.75
    reserve_memory()
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == str(MEMORY_FRACTION)
    assert memory_fraction() == MEMORY_FRACTION


@pytest.mark.parametrize("name", POOL)
def test_what_the_operator_sets_stays(fresh, name):
    fresh.setenv(name, "0.5")
    reserve_memory()
    assert {n: os.environ.get(n) for n in POOL} == {n: "0.5" if n == name else None for n in POOL}
    assert memory_fraction() == (0.5 if "FRACTION" in name else 0.75)


def test_without_a_plugin_nothing_is_set(fresh):
    fresh.setattr(gpu_settings.importlib.util, "find_spec", lambda name: None)
    reserve_memory()
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


def test_too_late_is_said(fresh, caplog):
    fresh.setattr(gpu_settings, "_started", lambda: True)
    fresh.setattr(gpu_settings, "backends", lambda: {"cuda": None})
    with caplog.at_level(logging.WARNING):
        reserve_memory()
    assert "XLA_CLIENT_MEM_FRACTION=0.94" in caplog.text
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


def test_flags_only_on_a_gpu_and_behind_the_operators(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options("cpu") == {}
    assert set(compiler_options("gpu")) == {flag.name for flag in FLAGS}
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1 --xla_gpu_enable_command_buffer=")
    assert "xla_gpu_enable_command_buffer" not in compiler_options("gpu")
    assert "xla_gpu_graph_min_graph_size" in compiler_options("gpu")


def test_the_budget_stays_within_the_pool():
    assert budget_bytes(1000, 0.9) == 900
    assert budget_bytes(1000, 0.97) == 940
    assert budget_bytes(1000, 0.9, 0.75) == 750
