"""What a measurement was made with, beside what run.json says."""

from __future__ import annotations

import subprocess
from pathlib import Path


def said(*command: str) -> str | None:
    """The first line of what a program prints, started in this checkout; None where it is not there or fails."""
    root = Path(__file__).resolve().parents[1]
    try:
        return (
            subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def commit(*but: str) -> str | None:
    """Of this checkout; "-dirty" behind it where files differ from it. but: those that results are written to."""
    found = said("git", "describe", "--always", "--exclude=*")
    differs = said("git", "diff", "--stat", "HEAD", "--", ".", *(f":(exclude){path}" for path in but))
    return f"{found}-dirty" if found and differs else found
