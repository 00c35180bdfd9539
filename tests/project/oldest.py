"""Prints pip constraints that pin every dependency of pyproject.toml, extras for GPUs apart, to the
oldest version that it allows: `make oldest` installs and tests with exactly these."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("plot", "sentencepiece", "hub", "server", "test", "dev")
BOUND = re.compile(r"(?P<name>[\w.-]+)(\[[\w,]+\])?>=(?P<version>[\w.]+)")


def oldest(pyproject: str) -> dict[str, str]:
    """Name -> oldest allowed version; ValueError for a dependency without a lower bound."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for e in EXTRAS for line in extras.get(e, ()))]
    bounds = {}
    for line in lines:
        if line.startswith(project["name"]):  # an extra that takes in another one
            continue
        match = BOUND.fullmatch(line)
        if match is None:
            raise ValueError(f"{line!r}: a dependency is written name>=version")
        if bounds.setdefault(match["name"], match["version"]) != match["version"]:
            raise ValueError(f"{match['name']}: two lower bounds")
    return bounds


if __name__ == "__main__":
    for name, version in oldest(PYPROJECT.read_text()).items():
        print(f"{name}=={version}")
