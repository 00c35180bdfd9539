"""The wheel holds every package: the list in pyproject.toml is that of the folders."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = ("deepinfer_jax", "scheduler", "models", "kernels_pallas", "launch")


def test_every_package_is_listed_with_its_folder():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        init.parent.relative_to(ROOT).as_posix()
        for top in TOP
        for init in (ROOT / top).rglob("__init__.py")
    }
    names = {f.replace("/", "."): f for f in folders}
    names = {
        n if n.startswith("deepinfer_jax") else f"deepinfer_jax.{n}": f for n, f in names.items()
    }
    assert set(tool["packages"]) == set(names)
    placed = {n: f for n, f in names.items() if not f.startswith("deepinfer_jax/")}
    assert tool["package-dir"] == placed
