"""What `make oldest` installs."""

from __future__ import annotations

import oldest
import pytest


def test_every_dependency_has_one_oldest_version():
    bounds = oldest.oldest(oldest.PYPROJECT.read_text())
    assert {"jax", "jaxlib", "flax", "numpy", "pytest"} <= bounds.keys()
    assert bounds["jax"] == bounds["jaxlib"]


@pytest.mark.parametrize("line", ["flax", "flax<2", "flax~=0.12", "numpy>=2.0"])
def test_a_dependency_without_a_lower_bound_or_with_two_is_refused(line):
    text = f"""
[project]
name = "x"
dependencies = ["numpy>=2.1", "{line}"]
optional-dependencies = {{}}
"""
    with pytest.raises(ValueError, match=line.partition(">")[0]):
        oldest.oldest(text)
