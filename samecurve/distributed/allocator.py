"""C library allocator settings for training on a CPU. (PyTorch's own caching allocator manages GPU memory.)"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_TRIM_BYTES = 2**31 - 1  # the maximum of a C int
# Larger blocks are still returned to the kernel: keeping them fragments the heap, because the gaps between them are too
# small for blocks of their size. glibc before 2.35 accepts at most 2 ** 25 (HEAP_MAX_SIZE / 2 in its malloc.c).
_KEPT_BYTES = 2**26, 2**25


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make glibc keep the memory that a step frees for the next step.

    By default glibc returns large blocks to the kernel, which hands them out again page by page and clears each page:
    31,600 page faults in a step of benchmarks/speed/pretrain.yaml, of which 1,700 are left. Other C libraries have no
    such call. Malloc settings of the user take precedence.

    Returns:
        Whether the setting is in effect.
    """
    own = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not own else None
    if mallopt is None or not any(mallopt(_MMAP_THRESHOLD, most) for most in _KEPT_BYTES):
        return False  # setting only the trim threshold would stop glibc from adapting its mmap threshold
    return bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))
