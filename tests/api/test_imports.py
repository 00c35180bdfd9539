"""The package's lazy exports, and what importing the scheduler must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deepinfer_jax


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules), sep='\\n')"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import deepinfer_jax",
        "import deepinfer_jax.scheduler",
        "from deepinfer_jax import SamplingParams, RequestOutput",
    ],
)
def test_loads_no_jax(statement):
    loaded = modules_after(statement)
    assert not {m for m in loaded if m.split(".")[0] in ("jax", "jaxlib", "flax", "orbax")}


def test_every_export_exists():
    assert set(deepinfer_jax._EXPORTS) | {"__version__"} == set(deepinfer_jax.__all__)
    for name in deepinfer_jax.__all__:
        assert getattr(deepinfer_jax, name) is not None
        assert name in dir(deepinfer_jax)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        deepinfer_jax.Nope  # noqa: B018


def test_a_tokenizer_needs_no_engine():
    loaded = modules_after("from deepinfer_jax.tokenizer import Tokenizer, load_tokenizer")
    assert not {m for m in loaded if m.startswith("deepinfer_jax.engine")}
