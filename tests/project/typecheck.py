"""Runs mypy over the packages and modules named in pyproject.toml's [tool.mypy] table ("packages"
and "modules"): part of `make lint`. mypy wants packages to lie where their names say, so it gets a
folder of links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import source_tree

LINKS = source_tree.ROOT / ".mypy_cache" / "links"  # one place, so that mypy's cache holds


def main() -> int:
    shutil.rmtree(LINKS, ignore_errors=True)
    source_tree.assembled(source_tree.ROOT, LINKS)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    environment = {**os.environ, "MYPYPATH": str(LINKS)}
    return subprocess.run(command, cwd=source_tree.ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
