"""The machine that a process runs on."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def machine() -> str:
    """Host names are not enough: cloned machines have the same one, and containers count their own process ids."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)
