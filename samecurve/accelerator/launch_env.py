"""The environment variables of `accelerate launch` for runs under the other launchers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from samecurve.distributed import network
from samecurve.strategy import launchers

if TYPE_CHECKING:
    from samecurve.strategy.plan import Strategy

_MESH = ("ACCELERATE_USE_PARALLELISM_CONFIG",)
_OURS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
# Set by accelerate launch from the user's file, of which translation.py may have understood more.
_REPLACED = (
    "FSDP_",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DOWNCAST_BF16",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
)


def environment(strategy: Strategy) -> dict[str, str]:
    """Compute the variables that Accelerate's plugins read, with Accelerate's own launcher code, from the YAML.

    With them every launcher configures `Accelerator` as `accelerate launch` does with a file of this content. A bare
    DeepSpeed JSON has no YAML; its variables are those of a YAML that names only the JSON.
    """
    if not strategy.distributed or (strategy.path is None and strategy.deepspeed_path is None):
        return {}
    if strategy.path is None:
        return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(strategy.deepspeed_path)}
    content = {"num_processes": strategy.world_size, **strategy.accelerate}
    content.pop("gpu_ids", None)  # of the launcher alone; Accelerate refuses one number, or reads it as text
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    # port 0, because Accelerate warns of a port in use or refuses it, and this job holds the real one
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        words = ["--config_file", file.name, "--main_process_port", "0", "train.py"]
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if not arguments.use_deepspeed:
        made = prepare_multi_gpu_env(arguments)
    else:
        arguments.num_machines = 1  # the processes exist already; only their variables are needed
        arguments.deepspeed_fields_from_accelerate_config = ""  # set only by launch_command, which does not run
        made = prepare_deepspeed_cmd_env(arguments)[1]
    return {key: value for key, value in made.items() if key.startswith(_OURS)}


def export_launch_env(strategy: Strategy, environ: Mapping[str, str] = os.environ) -> None:
    """Set the variables of `environment` in os.environ and, for a process without a launcher, a world of one.

    They replace those that accelerate launch has set from the file as it is written. Variables by which Accelerate
    would make a device mesh of its own are deleted, and under pipeline schedules those of FSDP, too: the engines make
    both themselves.
    """
    replaced = (*_REPLACED, "ACCELERATE_DYNAMO_") if strategy.distributed else ("ACCELERATE_DYNAMO_",)
    for name in [name for name in environ if name.startswith(replaced)]:
        del os.environ[name]
    os.environ.update(environment(strategy))
    for name in [name for name in environ if name in _MESH or name.startswith("PARALLELISM_CONFIG_")]:
        del os.environ[name]  # Accelerate would make a second mesh, or refuse an arrangement that it does not know
    if strategy.torch_schedule:
        for name in [name for name in environ if name == "ACCELERATE_USE_FSDP" or name.startswith("FSDP_")]:
            del os.environ[name]  # stages are sharded by the engine, and Accelerate would make FSDP of the whole
    if strategy.distributed:
        set_world_of_one(environ)


def set_world_of_one(environ: Mapping[str, str] = os.environ) -> None:
    """Set the variables of a launcher for a process without one, and what a launcher has left out."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": launchers.local_world_size(environ)}
    alone |= (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(network.free_port())} if "MASTER_PORT" not in environ else {}
    )
    for key, value in alone.items():
        os.environ.setdefault(key, value)


def rejoin_after_restart(backend: str | None, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> None:
    """Create the process group after a restart by torchrun; Accelerate and DeepSpeed use an existing group."""
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch
    from torch import distributed as dist

    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world_size, is_master=False)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environ["LOCAL_RANK"]))
    # With a key prefix of its own: torch 2.13 treats the launcher's key-value store as new at every restart
    # (distributed/rendezvous.py, _create_c10d_store). The store still contains the addresses of the dead processes, and
    # the new processes would wait for them (seen with a fixed --master_port and with --rdzv_backend c10d).
    dist.init_process_group(
        backend or "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"restart_{restart}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
