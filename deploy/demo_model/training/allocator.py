"""Keeps freed memory inside the process, for training loops on Linux with glibc.

Each step allocates and frees the same large buffers. By default glibc returns them to the kernel, and the
page faults of allocating them again cost about as much as a third of the arithmetic.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> None:
    """Ask glibc never to return memory; elsewhere does nothing."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
