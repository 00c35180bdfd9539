"""The documents name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer_jax.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = ("deepinfer_jax", "scheduler", "models", "kernels_pallas", "launch")


def sections(text: str) -> dict[str, str]:
    """`### folder/` headings of the module list -> their text."""
    parts = re.split(r"^### (\w+)/.*$", text.split("## The life of")[0], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("package", ["deepinfer_jax", "scheduler", "models", "kernels_pallas"])
def test_modules_in_the_architecture_exist(package):
    text = sections((ROOT / "docs" / "architecture.md").read_text())[package]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert named
    assert [n for n in named if not (ROOT / package / n).is_file()] == []


def test_readme_names_the_commands_and_existing_paths():
    text = (ROOT / "README.md").read_text()
    assert [c.name for c in COMMANDS if f"| `{c.name}` |" not in text] == []
    for path in re.findall(r"`((?:docs|scheduler|examples|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_readme_names_every_supported_architecture():
    from deepinfer_jax.models.registry import supported

    text = (ROOT / "README.md").read_text()
    assert [a for a in supported() if a not in text] == []


def test_relative_links_of_the_documents_resolve():
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", file.read_text()):
            assert (file.parent / target).exists(), f"{file}: {target}"
