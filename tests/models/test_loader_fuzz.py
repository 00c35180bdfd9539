"""Damaged files of every loader: see tests/fuzz/loader_fuzz.py; `make fuzz` goes on longer."""

from __future__ import annotations

from pathlib import Path

import loader_fuzz
import pytest


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_damaged_files_are_refused_or_load(tmp_path: Path, seed: int) -> None:
    counts = loader_fuzz.run(250, seed, tmp_path)
    assert counts["refused"] > 100 and counts["loaded"] > 10
