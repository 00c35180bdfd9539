"""Large pages for weights on a CPU: a decode step reads all of them, and with 4 KiB pages it looks
up an address every 4 KiB.

XLA's CPU buffers come from malloc, which Linux backs with large pages only where asked to
("madvise" mode, the usual setting).
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable

import jax

logger = logging.getLogger(__name__)

PAGE = 2 << 20
"""Bytes of a large page on x86-64 and on ARM with 4 KiB base pages."""
MADV_COLLAPSE = 25
"""Linux 6.1: make large pages of what lies there, now. The contents stay."""


def collapse(arrays: Iterable[jax.Array]) -> int:
    """Bytes of CPU arrays that lie in large pages afterwards; 0 where the system cannot or arrays
    lie elsewhere.

    An array smaller than a page counts where its neighbours in memory fill one together with it.
    """
    shards = [s.data for x in arrays for s in x.addressable_shards if s.device.platform == "cpu"]
    if not shards or sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for start, end in _spans((s.unsafe_buffer_pointer(), s.nbytes) for s in shards):
        for page in range(-(-start // PAGE) * PAGE, end - PAGE + 1, PAGE):
            done += PAGE * (madvise(page, PAGE, MADV_COLLAPSE) == 0)
    logger.debug("%.0f MB of weights in large pages", done / 1e6)
    return done


def _spans(buffers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of memory that holds nothing but the buffers (address, bytes) and less than a
    page between two of them."""
    spans: list[tuple[int, int]] = []
    for start, size in sorted(buffers):
        if spans and start - spans[-1][1] < PAGE:
            spans[-1] = spans[-1][0], max(spans[-1][1], start + size)
        else:
            spans.append((start, start + size))
    return spans
