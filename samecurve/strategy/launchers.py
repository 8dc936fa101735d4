"""Detects the launcher, its options and the world size.

`accelerate launch` passes variables to its children, but not the name of its config file. Its command line tells that.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.config.documents import COMMAND_LINE, ENVIRONMENT, ConfigProblem, Document, describe
from samecurve.errors import ConfigurationError

OWN_PROCESSES = "SAMECURVE_PROCESSES"  # set for the ranks that `train.py --num_processes` has started


@dataclass(frozen=True)
class Ancestor:
    """A parent process at any level: its command line and working directory."""

    argv: tuple[str, ...]
    directory: str


@dataclass(frozen=True)
class Launch:
    """The launcher that started this process, and the world that it describes.

    Attributes:
        launcher: "accelerate" | "torchrun" | "deepspeed" | "srun" | "python", or "train.py" with --num_processes.
        flags: the options of accelerate launch, without dashes (`num_processes`); None when they cannot be found.
        config_file: the file that accelerate launch reads.
        counted: True where the launcher was given the number of processes.
    """

    launcher: str
    world_size: int
    flags: Mapping[str, str] | None = None
    config_file: str | None = None
    problems: tuple[ConfigProblem, ...] = ()

    @property
    def counted(self) -> bool:
        if self.launcher == "accelerate":
            return self.flags is None or "num_processes" in self.flags
        return self.launcher != "python"


def detect_launch(
    environ: Mapping[str, str], local_rank: int | None, ancestors: Callable[[], Sequence[Ancestor]] | None = None
) -> Launch:
    """Detect the launcher.

    Args:
        local_rank: the argument that the deepspeed launcher adds.
        ancestors: replaces the parent processes in tests; called only when needed.
    """
    text, problems = environ.get("WORLD_SIZE", "1"), ()
    world_size = int(text) if text.isdecimal() else 0
    if not world_size:  # the rest of the configuration is still checked, as for one process
        what = f"found {describe(text)}, expected an integer above 0; leave it to the launcher"
        world_size, problems = 1, (ConfigProblem(ENVIRONMENT, "WORLD_SIZE", what, topology=True),)
    # Every path through accelerate launch exports this one, with "no" as its default.
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        launcher = "python"
        if "TORCHELASTIC_RUN_ID" in environ:
            launcher = "torchrun"
        # deepspeed sets CROSS_SIZE (the number of nodes) when given --no_local_rank
        elif local_rank is not None or "CROSS_SIZE" in environ:
            launcher = "deepspeed"
        # slurm_variables sets RANK to SLURM_PROCID; other launchers in a job number their ranks themselves
        elif "RANK" in environ and environ["RANK"] == environ.get("SLURM_PROCID"):
            launcher = "srun"
        return Launch(launcher, world_size, problems=problems)
    flags, directory = _accelerate_flags((ancestors or running_ancestors)())
    config_file = None
    if flags and flags.get("config_file"):
        config_file = flags["config_file"]
        if os.path.realpath(directory) != os.getcwd():  # accelerate launch opened it from its own working directory
            config_file = os.path.join(directory, config_file)
    # accelerate launch does not read the default file with --cpu (accelerate/commands/launch.py, 1.15)
    elif flags is not None and "cpu" not in flags:
        cache = environ.get("XDG_CACHE_HOME", "~/.cache")
        home = environ.get("HF_HOME", os.path.join(cache, "huggingface"))
        default = Path(home, "accelerate", "default_config.yaml").expanduser()
        config_file = str(default) if default.is_file() else None
        if config_file is None and flags.get("deepspeed_config_file"):  # a DeepSpeed JSON is a strategy, too
            config_file = os.path.join(os.path.relpath(directory), flags["deepspeed_config_file"])
    return Launch("accelerate", world_size, flags, config_file, problems)


def num_machines(launch: Launch, environ: Mapping[str, str]) -> int:
    """Return how many machines the launcher was given; 0 where it does not say."""
    if launch.launcher == "accelerate":
        given = (launch.flags or {}).get("num_machines", "")
        return int(given) if given.isdecimal() else 0
    local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE", "")  # the second is deepspeed's
    return launch.world_size // int(local) if local.isdecimal() and int(local) else 0


def own_processes(launch: Launch, num_processes: int | None, environ: Mapping[str, str]) -> Launch:
    """Return the launch of `--num_processes`: that of the ranks, also in the process that is to start them."""
    if OWN_PROCESSES in environ:
        return replace(launch, launcher="train.py")
    if num_processes is None:
        return launch
    if num_processes < 1:
        problem = ConfigProblem(COMMAND_LINE, "--num_processes", f"found {num_processes}, expected 1 or more")
    elif launch.launcher != "python":
        text = f"found {num_processes}, but {launch.launcher} has started this process; omit --num_processes here"
        problem = ConfigProblem(COMMAND_LINE, "--num_processes", f"{text}, or start train.py by python")
    else:
        return Launch("train.py", num_processes)
    return replace(launch, problems=(*launch.problems, problem))


def running_ancestors() -> list[Ancestor]:
    """This process's parents, nearest first, as far as the system shows them."""
    import psutil

    ancestors = []
    for process in psutil.Process().parents():
        try:
            ancestors.append(Ancestor(tuple(process.cmdline()), process.cwd()))
        except (psutil.Error, OSError):
            continue  # another user's, or ended by now
    return ancestors


def _accelerate_flags(ancestors: Sequence[Ancestor]) -> tuple[dict[str, str] | None, str]:
    """Return what follows `accelerate launch` in a parent's command line, and the directory of that parent."""
    for ancestor in ancestors:
        name = ""
        for index, word in enumerate(ancestor.argv):
            previous, name = name, os.path.basename(word)
            by_command = name == "accelerate-launch" or (word == "launch" and previous.startswith("accelerate"))
            if by_command or word.endswith(("accelerate.commands.launch", "accelerate/commands/launch.py")):
                return _parse_flags(ancestor.argv[index + 1 :]), ancestor.directory
    return None, ""


def _parse_flags(words: Sequence[str]) -> dict[str, str]:
    """Flags before the training script. A flag without a value maps to ""."""
    flags: dict[str, str] = {}
    last = None
    for word in words:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            last = name.lstrip("-").replace("-", "_")
            flags[last] = value
        elif word.endswith(".py") or word == "samecurve.train":
            break
        elif last is not None and not flags[last]:
            flags[last] = word
    return flags


# Keys that only `accelerate launch` reads, with the values that ask for nothing.
_OF_THE_LAUNCHER = {
    ("gpu_ids",): ("all", None),
    ("machine_rank",): (0, None),
    ("main_process_ip",): (None,),
    ("main_process_port",): (None,),
    ("rdzv_backend",): ("static", None),
    ("same_network",): (True, None),
    ("deepspeed_config", "deepspeed_hostfile"): (None,),
    ("deepspeed_config", "deepspeed_inclusion_filter"): (None,),
    ("deepspeed_config", "deepspeed_exclusion_filter"): (None,),
    ("deepspeed_config", "deepspeed_multinode_launcher"): ("standard", "pdsh", None),
}


def unread_keys(launch: Launch, accelerate: Document) -> dict[str, str]:
    """The keys of an Accelerate YAML that only `accelerate launch` reads, if another launcher started this."""
    if launch.launcher == "accelerate":
        return {}
    asked = [path for path, usual in _OF_THE_LAUNCHER.items() if accelerate.get(*path) not in usual]
    return {".".join(path): f"only accelerate launch reads it, and {launch.launcher} started this" for path in asked}


# Flags and variables that must not override the files: both names, harmless values, the reason.
_JSON_OWNS = "the DeepSpeed JSON sets this"
_OVERRIDES = (
    ("mixed_precision", "ACCELERATE_MIXED_PRECISION", ("no",), "the recipe's precision sets this"),
    ("cpu", "ACCELERATE_USE_CPU", ("false", "0", "no", "off", "f", "n"), "it turns FSDP and DeepSpeed off"),
    ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", (), "the recipe's batch sets this"),
    ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", (), "the recipe's optimizer.max_grad_norm sets this"),
    ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", (), _JSON_OWNS),
    ("offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", (), _JSON_OWNS),
    ("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", (), _JSON_OWNS),
    ("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", ("no",), "the recipe sets torch.compile, by the key compile"),
)

# Flags of accelerate launch about processes and machines, which no file sets.
_FREE_FLAGS = frozenset(
    "config_file num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids same_network "
    "rdzv_backend rdzv_conf max_restarts monitor_interval num_cpu_threads_per_process enable_cpu_affinity quiet q "
    "debug tee t log_dir role module m main_training_function deepspeed_hostfile deepspeed_exclusion_filter "
    "deepspeed_inclusion_filter deepspeed_multinode_launcher".split()
)


# Flags of accelerate launch that choose the distributed_type.
_TYPES = {"multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED"}


def override_problems(
    launch: Launch, environ: Mapping[str, str], accelerate: Mapping, precision: str = ""
) -> Iterator[ConfigProblem]:
    """Report flags and variables that would override the recipe or the strategy's files. Those that agree are none.

    Args:
        accelerate: the YAML's content; what accelerate launch exports from it is judged there and not here.
        precision: the recipe's.
    """
    flags = dict(launch.flags or {})
    in_file = _texts(accelerate)
    agreed = {flag: {text} for flag, text in in_file.items()}
    agreed.setdefault("mixed_precision", set()).add("no" if precision == "fp32" else precision)
    agreed |= {flag: {""} for flag, kind in _TYPES.items() if accelerate.get("distributed_type") == kind}
    if (json_file := flags.get("deepspeed_config_file")) and (launch.config_file or "").endswith(json_file):
        agreed |= {"use_deepspeed": {""}, "deepspeed_config_file": {json_file.lower()}}
    for flag, variable, harmless, reason in _OVERRIDES:
        value, given = environ.get(variable, ""), flags.pop(flag, None)
        accepted = {*harmless, *agreed.get(flag, ())}
        if given is not None and given.lower() not in accepted:
            text = f"given to accelerate launch, but {reason}; remove the flag"
            yield ConfigProblem(COMMAND_LINE, f"--{flag}", text)
        elif given is None and value and value.lower() not in accepted and flag not in in_file:
            yield ConfigProblem(ENVIRONMENT, variable, f"found {describe(value)}, but {reason}; unset it")
    for flag, given in flags.items():
        if flag not in _FREE_FLAGS and given.lower() not in agreed.get(flag, ()):
            text = "given to accelerate launch, but the strategy's file sets this; remove the flag"
            yield ConfigProblem(COMMAND_LINE, f"--{flag}", text)


def _texts(accelerate: Mapping) -> dict[str, str]:
    """The values of an Accelerate YAML as flags of accelerate launch would say them."""
    blocks = [accelerate, *(block for block in accelerate.values() if isinstance(block, dict))]
    texts = {key: str(value).lower() for block in blocks for key, value in block.items()}
    if "use_cpu" in texts:
        texts["cpu"] = "" if texts["use_cpu"] == "true" else texts["use_cpu"]
    if texts.get("fp16") == "true":
        texts["mixed_precision"] = "fp16"
    return texts


def slurm_variables(environ: Mapping[str, str], first_host: Callable[[str], str] | None = None) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and the like for a task of srun; {} under another launcher, or for a single task.

    A batch script is task 0 of no step: only the step's own variables tell what srun started.

    Args:
        first_host: replaces `scontrol show hostnames` in tests.

    Raises:
        ConfigurationError: the nodes have a list of names, and there is no `scontrol` to read it.
    """
    # srun --pty starts a shell for a person, of which the other tasks know nothing
    if "RANK" in environ or "SLURM_PTY_PORT" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    head = environ.get("MASTER_ADDR")
    if not head:
        head = (first_host or _first_host)(environ["SLURM_STEP_NODELIST"])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": _slurm_tasks_here(environ),
        "MASTER_ADDR": head,
        # the same for all tasks of a job, and another one for a job that shares the node
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + int(environ["SLURM_JOB_ID"]) % 20000),
    }


def _slurm_tasks_here(environ: Mapping[str, str]) -> str:
    # SLURM writes the tasks of all nodes as 4(x2),3
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    node, nodes = int(environ.get("SLURM_NODEID", "0")), int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    return str(counts[node] if node < len(counts) else max(1, int(environ["SLURM_STEP_NUM_TASKS"]) // nodes))


def local_world_size(environ: Mapping[str, str]) -> str:
    """Return the number of this host's processes: torchrun, deepspeed and SLURM say it in variables of their own.

    Where none does, all processes are on this host if they meet at it, else one of them is.
    """
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if name in environ:
            return environ[name]
    world = environ.get("WORLD_SIZE", "1")
    if environ.get("SLURM_STEP_NUM_TASKS") == world:
        return _slurm_tasks_here(environ)
    return world if environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1") else "1"


def _first_host(nodes: str) -> str:
    if not {*"[,"} & {*nodes}:
        return nodes
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        text = f"MASTER_ADDR: not set, and `{' '.join(command)}` does not say the first of the nodes ({error})"
        raise ConfigurationError(f"{text}; export MASTER_ADDR with its name") from error


# A file in output_dir from a start with --fresh, or with --resume and one of its own checkpoints, until the later ones
# have been moved aside.
STARTING_OVER = ".starting_over"

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether the same command was started again by torchrun --max-restarts or requeued by SLURM, not by a person."""
    return any(environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def continues_own_run(environ: Mapping[str, str], output_dir: str) -> bool:
    """Whether this is a restart that finds checkpoints of its own run, not those that it has yet to move aside."""
    folder = Path(output_dir)
    own = any((folder / "checkpoints").glob("step_*")) and not (folder / STARTING_OVER).exists()
    return is_restart(environ) and own
