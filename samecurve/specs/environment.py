"""Versions of installed packages and the name of the processor."""

from __future__ import annotations

import contextlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

VERSIONED = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "peft",
    "datasets",
    "bitsandbytes",
    "torchao",
    "liger-kernel",
    "triton",
    "samecurve",
)


def processor(about: Path = Path("/proc/cpuinfo")) -> str:
    """Name the processor as Linux does, else as Python does, whose name is often empty.

    The name includes family and model, because some clouds give several processors the same model name.
    """
    with contextlib.suppress(OSError):  # other systems have no /proc
        lines = (line.partition(":") for line in about.read_text(encoding="utf-8").splitlines())
        fields = {key.strip(): value.strip() for key, _, value in lines}
        keys = [key for key in ("cpu family", "model") if key in fields]
        details = ", ".join(f"{key.removeprefix('cpu ')} {fields[key]}" for key in keys)
        if "model name" in fields:
            return f"{fields['model name']} ({details})" if details else fields["model name"]
    return platform.processor() or platform.machine()


@cache  # rules name versions when their modules are imported
def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dated(package: str) -> str:
    """Name a package with its version, as in "torch 2.13.0", in a refusal that another version might not need.

    A package that is not installed, as DeepSpeed is not on every laptop, has its name only.
    """
    return " ".join(filter(None, (package, version(package))))


def versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that affect a run's numbers; None for a missing package."""
    return {"python": platform.python_version(), **{name: version(name) for name in VERSIONED}}
