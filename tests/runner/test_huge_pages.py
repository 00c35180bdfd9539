"""Weights in large pages: contents stay, and the kernel says that the pages are large."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runner import huge_pages


def large_bytes(start: int, end: int) -> int:
    """AnonHugePages of the mappings that hold part of start..end, from /proc/self/smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) < end and int(bounds[2], 16) > start
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_collapse_keeps_contents_and_tells_the_truth():
    values = np.arange(6 << 20, dtype=np.int32)
    x = jnp.array(values)
    done = huge_pages.collapse([x])
    np.testing.assert_array_equal(x, values)
    if not done:
        pytest.skip("this kernel makes no large pages on request (Linux >= 6.1 does)")
    start = x.unsafe_buffer_pointer()
    assert (
        large_bytes(start, start + x.nbytes) >= huge_pages.PAGE
    )  # not all: a kernel short of memory splits pages again


def test_small_arrays_join_their_neighbours_only():
    page = huge_pages.PAGE
    assert huge_pages._spans([(0, 10), (page - 1, 5), (3 * page, 1)]) == [
        (0, page + 4),
        (3 * page, 3 * page + 1),
    ]


def test_nothing_on_the_cpu_is_nothing_to_do():
    assert huge_pages.collapse([]) == 0
