"""One process of a training script under observation.

    python -m samecurve.prove.process FILE SCRIPT [ARGUMENTS ...]

The script sees what `accelerate launch` with the strategy's file would give it, on a CPU. FILE has a Watch as JSON.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from samecurve.accelerator import cpu_bridge, launch_env
from samecurve.errors import StorageError
from samecurve.prove.recorder import Reading, Recorder
from samecurve.storage.records import read_record
from samecurve.strategy.launchers import Launch
from samecurve.strategy.resolve import describe_strategy, read_files


@dataclass(frozen=True)
class Watch:
    """How a run of a script is observed.

    Attributes:
        folder: of the records, `rank_N.jsonl`.
        steps: updates of the weights.
        strategy: an Accelerate YAML; None for a single process without a launcher.
        merged: batches of the script that become one; 1 leaves them alone.
        backwards: whether the rows of each batch are read in the opposite order.
        replay: rows of each batch, in place of the script's.
        rates: learning rates of each update, in place of the script's.
    """

    folder: str = ""
    steps: int = 1
    strategy: str | None = None
    merged: int = 1
    backwards: bool = False
    replay: list[list[int]] | None = None
    rates: list[list[float]] | None = None


def main() -> None:
    watch = Watch(**read_record(Path(sys.argv[1])).require(StorageError, "run prove again"))
    script, *arguments = sys.argv[2:]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if watch.strategy is not None:
        strategy = describe_strategy(read_files(watch.strategy), Launch("torchrun", world))
        launch_env.export_launch_env(strategy)
        cpu_bridge.prepare(strategy.distributed, strategy.shards_model, strategy.deepspeed is not None)
        if strategy.deepspeed is not None:
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        _keep_gloo(None if strategy.deepspeed is not None else PartialState().distributed_type)
        dist.init_process_group = lambda *_, **__: None  # a script's own finds the group made
    reading = Reading(watch.merged, watch.backwards, watch.replay)
    reading.install()
    Recorder(Path(watch.folder, f"rank_{rank}.jsonl"), watch.steps, reading, watch.rates).install()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _keep_gloo(kind: DistributedType | None) -> None:
    """Have Accelerate's state made again as it is, where a script resets it, as Trainer does: by itself it would choose
    NCCL, or no group at all without a GPU. kind: None leaves that to Accelerate."""
    construct = PartialState.__init__

    @wraps(construct)
    def constructed(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        is_new = not PartialState._shared_state
        construct(self, cpu, **kwargs | ({"backend": "gloo"} if is_new else {}))
        if is_new and kind is not None:
            PartialState._shared_state["distributed_type"] = kind

    PartialState.__init__ = constructed
    PartialState(backend="gloo")


if __name__ == "__main__":
    main()
