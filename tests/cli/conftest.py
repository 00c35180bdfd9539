"""What the tests of the commands share."""

from __future__ import annotations

import pytest
from fake_llm import FakeLLM

from deepinfer_jax.cli import common


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(common, "build_llm", lambda args, **kw: fake)
    return fake
