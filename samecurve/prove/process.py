"""One process of a training script under observation.

    python -m samecurve.prove.process FILE SCRIPT [ARGUMENTS ...]

The script sees what `accelerate launch` with the strategy's file would give it, on a CPU. FILE has a Watch as JSON.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

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
    watch, (script, *arguments) = (
        Watch(**read_record(Path(sys.argv[1])).require(StorageError, "run prove again")),
        sys.argv[2:],
    )
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if watch.strategy is not None:
        strategy = describe_strategy(read_files(watch.strategy), Launch("torchrun", world))
        launch_env.export_launch_env(strategy)
        cpu_bridge.prepare(strategy.distributed, strategy.shards_model, strategy.deepspeed is not None)
        if strategy.deepspeed is not None:
            import deepspeed
            from accelerate.state import PartialState

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            PartialState(backend="gloo")
    reading = Reading(watch.merged, watch.backwards, watch.replay)
    reading.install()
    Recorder(Path(watch.folder, f"rank_{rank}.jsonl"), watch.steps, reading, watch.rates).install()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
