"""Ports for processes of this machine that meet each other."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Below the ports of outgoing connections (32768 and up on Linux): one could take it before a launcher does."""
    draw = random.SystemRandom()  # not the seeded one, with which processes beside this one would draw the same
    while True:
        port = draw.randrange(15_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
