"""Checks that this machine can run a strategy, before torch is loaded and minutes of work are lost.

DeepSpeed compiles some operators on first use and fails during start-up when a compiler is missing: `cpu_adam` for an
optimizer in CPU memory or on NVMe, `async_io` for NVMe. On a CPU every DeepSpeed strategy would compile a third one,
which samecurve's CPU support avoids (read in DeepSpeed 0.19.8).
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from samecurve.config.hub_access import use_cache_without_hub
from samecurve.errors import ConfigurationError, SamecurveError, StorageError
from samecurve.specs.environment import has_accelerator, has_python_headers
from samecurve.specs.precision import COMPILED
from samecurve.strategy import build_supervisor, op_build_locks
from samecurve.strategy.resolve import resolve_plan

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.strategy.plan import Plan, Strategy

# fp32 weight, gradient and two Adam moments, and the bf16 weight: 18; 17.9 measured with 4.3 M parameters on two ranks
NVME_BYTES_PER_PARAMETER = 18
# c10/cuda/CUDAAllocatorConfig.h: the first since torch 2.9, the others still
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_SETTINGS = "expandable_segments:True"


def plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Resolve command line and environment into a plan, check the machine and prepare this process for training.

    torch is not loaded.
    """
    resolved = resolve_plan(argv, environ)
    try:
        prepare_process(resolved, environ)  # first, because it sets the PATH on which compilers are looked for
        check_machine(resolved, environ)
        prepare_builds(resolved.strategy, environ)  # last: it may wait for minutes
    except SamecurveError as error:
        error.output_dir = resolved.recipe.output_dir  # whose status.json records the refusal
        raise
    return resolved


def prepare_process(plan: Plan, environ: Mapping[str, str] = os.environ) -> None:
    """Set PATH, the allocator's settings and, without a connection to the hub, HF_HUB_OFFLINE in os.environ."""
    prepare_environment()
    prepare_allocator()
    quiet_libraries()
    without_hub = use_cache_without_hub(plan.recipe)
    if without_hub and environ.get("RANK", "0") == "0":
        print(without_hub, flush=True)


def prepare_builds(strategy: Strategy, environ: Mapping[str, str] = os.environ) -> None:
    """Prepare the compilation of DeepSpeed's operators, if the strategy needs any.

    The first process of the machine removes stale build locks, and may wait for builds of other hosts (see
    op_build_locks.py).
    """
    needed = operators(strategy)
    if needed:
        supervise_builds()
    # async_io's builder loads pin_memory first (deepspeed/ops/op_builder/async_io.py, 0.19)
    if needed and environ.get("LOCAL_RANK", "0") == "0":
        op_build_locks.clear_build_locks({*needed, "pin_memory"}, print, environ)


def prepare_environment() -> None:
    """Put this Python's own bin folder first on PATH, so that operators are compiled by the ninja installed there.

    `.venv/bin/python` and `.venv/bin/accelerate` do not do this without activating the environment, and another ninja
    would compile everything anew: 1.11 and 1.13 do not read each other's logs (seen; minutes for async_io). DeepSpeed
    compiles inside the worker, so the worker's start is early enough.
    """
    own = str(Path(sys.executable).parent)
    others = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != own]
    os.environ["PATH"] = os.pathsep.join([own, *others])


def supervise_builds() -> None:
    """Put our own `ninja` before the real one, so that a build ends with this process; see build_supervisor.py."""
    folder = str(build_supervisor.SUPERVISED)
    others = [path for path in os.environ["PATH"].split(os.pathsep) if path != folder]
    os.environ["PATH"] = os.pathsep.join([folder, *others])
    os.environ |= {"SAMECURVE_PYTHON": sys.executable, build_supervisor.RANK: str(os.getpid())}


def quiet_libraries() -> None:
    """Silence torchao's warnings. Call it before transformers is imported.

    transformers imports torchao where installed, which warns about operators for other devices and about a call of its
    own that torch 2.13 deprecates (seen with torchao 0.18).
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def prepare_allocator(environ: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")) -> None:
    """Let segments of GPU memory grow instead of leaving gaps, unless the user configured the allocator.

    PyTorch reads the setting when CUDA's library is loaded. AMD's devices and WSL's are left out, because not every
    build supports it there.
    """
    if has_accelerator(environ) and any(devices.glob("nvidia[0-9]*")) and not allocator_settings(environ):
        environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS


def allocator_settings(environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's allocator settings with their variables; "" without any. All versions prefer the first name."""
    settings = (f"{environ[name]} ({name})" for name in ALLOCATOR_VARIABLES if name in environ)
    return ", ".join(settings)


def check_machine(plan: Plan, environ: Mapping[str, str] = os.environ) -> None:
    """Check that this machine has what the plan needs, and change nothing.

    Raises:
        ConfigurationError: lists everything that this machine lacks.
    """
    problems = environment_problems(plan.strategy, plan.recipe.precision, environ)
    problems += compiler_problems(plan.recipe, has_accelerator(environ), environ)
    if not has_accelerator(environ) and plan.recipe.batch.is_auto and plan.recipe.memory.limit_gib is None:
        problems.append(
            "batch.micro_batch_size: found auto, which fills the memory of a GPU, and there is none; set "
            "memory.limit_gib to the GiB that each process may use, or give a number"
        )
    if problems:
        lines = ["this machine cannot run the strategy", *(f"  {problem}" for problem in problems)]
        raise ConfigurationError("\n".join(lines))


def check_room(strategy: Strategy, num_parameters: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise StorageError when an NVMe folder is too small for the model.

    Args:
        num_parameters: all parameters of the model, over all ranks.
    """
    local_ranks = int(environ.get("LOCAL_WORLD_SIZE", strategy.world_size))
    needed_bytes = num_parameters * NVME_BYTES_PER_PARAMETER * local_ranks // strategy.world_size
    for path in set(strategy.nvme_paths):
        free_bytes = shutil.disk_usage(existing_parent(path)).free
        if free_bytes < needed_bytes:
            sizes = (
                f"{free_bytes / 1e9:.1f} GB are free, but the model and Adam's states need {needed_bytes / 1e9:.1f} GB"
            )
            raise StorageError(
                f"strategy {strategy.name}: nvme_path {path}: {sizes} ({NVME_BYTES_PER_PARAMETER} bytes a parameter); "
                "set it to a larger disk in the DeepSpeed JSON"
            )


def environment_problems(strategy: Strategy, precision: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """List why this machine cannot run the strategy, each with the fix; [] if it can. precision: the recipe's."""
    accelerator = has_accelerator(environ)
    problems = []
    if strategy.shards_model and strategy.offload and not accelerator:
        problems.append(
            "FSDP offloads through pinned memory, which needs an accelerator, and this machine has none; "
            "use configs/zero3_offload.yaml here, or configs/fsdp.yaml, which does not offload"
        )
    if strategy.deepspeed is not None and precision == "fp16" and not accelerator:
        problems.append(
            "DeepSpeed trains in fp16 on accelerators only, and this machine has none; set precision to bf16 or fp32"
        )
    if strategy.backend == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        problems.append(
            "needs DeepSpeed, which is not installed: pip install 'samecurve[deepspeed]' (beside a clone: pip install "
            "deepspeed), or use configs/fsdp.yaml or configs/ddp.yaml, which do not need it"
        )
    problems += _tools(strategy, environ, accelerator)
    for path in sorted(set(strategy.nvme_paths)):
        # a missing parent is refused: /mnt/nvme/swap on a machine without that disk would fill the disk of /
        existing = existing_parent(path)
        if not existing.is_dir():
            why = f"{existing} is a file; set it to a folder on a local disk in the DeepSpeed JSON"
        elif existing not in (path.absolute(), path.absolute().parent):
            why = f"no such folder: {path.absolute().parent}; create it, or use one on a local disk"
        elif not os.access(existing, os.W_OK | os.X_OK):
            why = f"{existing} is not writable; use a writable folder on a local disk"
        else:
            continue
        problems.append(f"nvme_path {path}: {why}")
    return [f"strategy {strategy.name}: {text}" for text in problems]


def compiler_problems(recipe: Recipe, accelerator: bool, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the recipe's keys that need a compiler which this machine lacks, each with the fix.

    torch.compile needs a C++ compiler on a CPU. On a GPU Triton makes the kernels, Liger's too, and builds their
    launchers with a C compiler (triton/runtime/build.py).
    """
    # g++ is the default of PyTorch's Inductor on Linux (cpp.cxx in torch/_inductor/config.py)
    variable, usual, language = ("CC", ("gcc", "clang"), "C") if accelerator else ("CXX", ("g++",), "C++")
    names = shlex.split(environ.get(variable, ""))[:1] or usual
    lacks = f"needs a {language} compiler, but {names[0]!r} is not on PATH: apt-get install {usual[0]}"
    if any(shutil.which(name, path=environ.get("PATH", os.defpath)) for name in names):
        if not accelerator or has_python_headers():
            return
        lacks = "needs Python's headers, but Python.h is not there: apt-get install python3-dev"
    asked = [("compile", recipe.compile, "off")] if recipe.compile in COMPILED else []
    ligers = (
        ("model.kernels", recipe.model.kernels, "torch"),
        ("loss.implementation", recipe.loss.implementation, "auto"),
    )
    asked += [entry for entry in ligers if accelerator and entry[1] == "liger"]  # refused elsewhere
    for key, value, instead in asked:
        yield f"{key}: {value} {lacks}, or {key}={instead}"


def operators(strategy: Strategy) -> set[str]:
    """Return the DeepSpeed operators that the run will compile, or load from DeepSpeed's own build."""
    needed = set()
    config = strategy.deepspeed
    if strategy.offloads_optimizer and config is not None and config.get("zero_force_ds_cpu_optimizer", True):
        needed.add("cpu_adam")
    if any(target.endswith(":nvme") for target in strategy.offload):
        needed.add("async_io")
    return needed


def _tools(strategy: Strategy, environ: Mapping[str, str], accelerator: bool) -> Iterator[str]:
    needed = operators(strategy) - prebuilt_operators()
    if not needed:
        return
    why = f"DeepSpeed compiles {', '.join(sorted(needed))} on first use"
    folders = environ.get("PATH", os.defpath).split(os.pathsep) + [str(Path(sys.executable).parent)]
    # our own ninja only starts the installed one
    search = os.pathsep.join(folder for folder in folders if folder != str(build_supervisor.SUPERVISED))
    compiler = shlex.split(environ.get("CXX", "")) or ["c++"]
    if not shutil.which("ninja", path=search):
        yield f"{why}, but ninja is not installed: pip install ninja"
    if not shutil.which(compiler[0], path=search):
        yield (
            f"{why}, but the C++ compiler {compiler[0]!r} is not on PATH: apt-get install g++, "
            "or conda install -c conda-forge cxx-compiler"
        )
    elif "async_io" in needed and not links_libaio(compiler, environ):
        yield (
            f"{why}, but libaio.h or libaio.so is missing: apt-get install libaio-dev (Debian, Ubuntu), "
            "dnf install libaio-devel (Fedora, RHEL), or conda install -c conda-forge libaio"
        )
    if "async_io" in needed and accelerator and not _cuda_toolkit(environ, search):
        yield f"{why}, and on a GPU machine that needs the CUDA toolkit: install it, or set CUDA_HOME to its folder"


def prebuilt_operators() -> set[str]:
    """Return the operators of a DeepSpeed installed with DS_BUILD_OPS=1, read without importing DeepSpeed."""
    package = importlib.util.find_spec("deepspeed")
    build = Path(package.origin).with_name("git_version_info_installed.py") if package and package.origin else None
    if build is None or not build.is_file():
        return set()
    match = re.search(r"^installed_ops\s*=\s*(\{.*\})", build.read_text(), re.MULTILINE)
    return {name for name, built in ast.literal_eval(match.group(1)).items() if built} if match else set()


def links_libaio(compiler: list[str], environ: Mapping[str, str]) -> bool:
    """Whether a program that uses libaio can be linked.

    Tried by a build, as in DeepSpeed's own check: the header may be in many places, also in a conda environment.
    """
    source = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    with TemporaryDirectory() as folder:
        command = [*compiler, "-x", "c++", "-", "-o", f"{folder}/probe", "-laio"]
        return subprocess.run(command, input=source, text=True, capture_output=True, env=dict(environ)).returncode == 0


def _cuda_toolkit(environ: Mapping[str, str], search: str) -> bool:
    """Whether the CUDA toolkit is where torch.utils.cpp_extension looks for it, with its compiler."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    return Path(named, "bin", "nvcc").is_file() or shutil.which("nvcc", path=search) is not None


def existing_parent(path: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
