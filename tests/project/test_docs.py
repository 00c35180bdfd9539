"""The documents name what exists."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_jax.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = ("deepinfer_jax", "scheduler", "models", "kernels_pallas", "launch")


def test_files_named_in_the_documents_exist():
    """`folder/file.py` or `folder/` in backticks, with one of the project's folders in front."""
    folders = "|".join((*PACKAGES, "docs", "examples", "benchmarks", "tests"))
    named = {
        (file.name, path)
        for file in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", file.read_text())
    }
    assert len(named) > 40
    assert sorted(n for n in named if not (ROOT / n[1]).exists()) == []


def test_readme_names_the_commands():
    text = (ROOT / "README.md").read_text()
    assert [c.name for c in COMMANDS if f"| `{c.name}` |" not in text] == []


def test_readme_names_every_supported_architecture():
    from deepinfer_jax.models.registry import supported

    text = (ROOT / "README.md").read_text()
    assert [a for a in supported() if a not in text] == []


def test_relative_links_of_the_documents_resolve():
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", file.read_text()):
            assert (file.parent / target).exists(), f"{file}: {target}"
