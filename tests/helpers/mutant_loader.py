"""pytest plugin: one module of the product is loaded with one of its lines changed.

`-p mutant_loader` with MUTANT_FILE (path from the repository's root) and MUTANT_SOURCE (a file that
holds the changed source). No file of the tree is written, and no byte code of the change is kept.
"""

from __future__ import annotations

import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / os.environ["MUTANT_FILE"])
CHANGED = Path(os.environ["MUTANT_SOURCE"]).read_bytes()

_get_code = SourceFileLoader.get_code


def get_code(loader: SourceFileLoader, fullname: str):
    if loader.get_filename(fullname) != TARGET:
        return _get_code(loader, fullname)
    return loader.source_to_code(CHANGED, TARGET)


SourceFileLoader.get_code = get_code


def pytest_report_header() -> str:
    return f"mutant of {os.environ['MUTANT_FILE']}"
