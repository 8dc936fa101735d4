"""Identification of the machine that a process runs on."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def machine() -> str:
    """Return a text that is the same for all processes whose process ids can be compared.

    Built from host name, boot id and process id namespace. The host name alone is not enough: cloned machines have the
    same one, and each container has process ids of its own.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
