"""The C library's memory, where a CPU trains. (A GPU's is in the hands of PyTorch's own allocator.)"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_TRIM_BYTES = 2**31 - 1  # a C int's most
# Larger blocks come and go: what lies between some that were kept would be lost to others of their size. Before 2.35
# glibc takes no more than 2 ** 25 (HEAP_MAX_SIZE / 2 of its malloc.c).
_KEPT_BYTES = 2**26, 2**25


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let glibc keep what a step frees for the next one. Whether it does; not where the user has settings of malloc.

    By default it gives large blocks back to the kernel, which hands them out again page by page, each one cleared:
    31,600 page faults in a step of benchmarks/speed/pretrain.yaml, of which 1,700 are left. Other C libraries have no
    such call.
    """
    own = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not own else None
    if mallopt is None or not any(mallopt(_MMAP_THRESHOLD, most) for most in _KEPT_BYTES):
        return False  # and the other one alone would keep glibc from learning which blocks come again
    return bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))
