"""What a measurement was made with, beside what run.json says."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from samecurve.specs.environment import processor, version

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")


def description() -> str:
    """Cores, processor, GPUs where torch is loaded, and versions, for a page's line about its machine."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    torch = sys.modules.get("torch")
    gpus = (
        f", {torch.cuda.device_count()} {torch.cuda.get_device_name()}" if torch and torch.cuda.is_available() else ""
    )
    return f"{os.cpu_count()} cores of {processor()}{gpus}; Python {platform.python_version()}, {versions}"


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
