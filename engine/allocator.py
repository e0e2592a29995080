"""The C library's allocator, as a process wants it that computes steps of like sizes for days."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Up to `KEPT_BYTES` of what a step frees stay with the process, for the next step.

    Otherwise a tensor of a few megabytes is mapped for each operation and given back after it, and the kernel clears
    its pages each time: 64 prompt tokens behind 3,000 others took 88 ms in attention, 46 with this. Called once the
    model is loaded, since what stays for good may well be mapped. Where the C library is not glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
