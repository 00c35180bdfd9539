"""What becomes of memory that XLA's CPU buffers give back: kept for the next one, where the C
library can be told to."""

from __future__ import annotations

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20
"""What glibc accepts on 64-bit machines."""


@functools.cache
def keep_freed(largest: int, total: int) -> bool:
    """Buffers of up to `largest` bytes come from the heap from now on, which keeps up to `total`
    free bytes at its end. For the whole process. By default glibc gives a freed buffer of megabytes
    back to the system, and to get its pages back costs several times what filling them does. False
    where the C library is another one."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, min(largest, LARGEST_MMAP_THRESHOLD))
        and mallopt(M_TRIM_THRESHOLD, total)
    )
