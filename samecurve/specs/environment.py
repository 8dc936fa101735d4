"""Where samecurve is installed, versions of installed packages, accelerators and the name of the processor."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
IN_CLONE = not (_PACKAGE / "shipped").is_dir()  # setup.py makes that folder in a wheel
# the folder of train.py, recipes/, configs/, ds_configs/ and docs/
ROOT = _PACKAGE.parent if IN_CLONE else _PACKAGE / "shipped"
INSTALL = "pip install -r requirements.txt" if IN_CLONE else "pip install 'samecurve[deepspeed]'"
SHIPPED = ("recipes", "configs", "ds_configs")

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


def train_script() -> str:
    """Return what a command that is to be copied calls: train.py, from here, or the installed package's."""
    if not IN_CLONE:
        return "-m samecurve.train"
    return "train.py" if Path.cwd() == ROOT else shlex.quote(str(ROOT / "train.py"))


def shipped_file(path: str) -> str:
    """Return the path; for a file that only the installed samecurve has, such as recipes/lora.yaml, its path there."""
    inside = ROOT / path
    return str(inside) if path.startswith(SHIPPED) and not os.path.lexists(path) and os.path.isfile(inside) else path


def has_accelerator(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """Whether torch will find a GPU: a device file exists (NVIDIA, ROCm, WSL), is not hidden, and torch supports GPUs.

    torch itself would know better, but loading it takes seconds, and configuration errors are reported before that.
    """
    if any(environ.get(name, "0").strip() in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")):
        return False
    build = version("torch") or ""
    if build.endswith("+cpu"):
        return False
    patterns = ["kfd"] if "rocm" in build else ["nvidia[0-9]*", "dxg"]
    return any(True for pattern in patterns for _ in devices.glob(pattern))


def has_python_headers() -> bool:
    """Whether Python.h is there, which Triton builds its launchers with (triton/runtime/build.py has the scheme)."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_paths(scheme)["include"], "Python.h").is_file()


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
