"""One process of a twin's training: it writes which rows each step reads, and is killed after a step.

    python -m samecurve.prove.rank FOLDER KILLED_AFTER [ARGUMENTS of train.py ...]

KILLED_AFTER is the last step before SIGKILL; 0 lets it end.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from samecurve.data.batches import StepBatches
from samecurve.data.micro_batch import MicroBatch
from samecurve.prove.twin import row_keys
from samecurve.specs.environment import ROOT


def main() -> None:
    folder, killed_after = Path(sys.argv[1]), int(sys.argv[2])
    stream = (folder / f"rank_{os.environ.get('RANK', '0')}.jsonl").open("w", encoding="utf-8")
    iterate = StepBatches.__iter__

    def watched(batches: StepBatches) -> Iterator[list[MicroBatch]]:
        for micro_batches in iterate(batches):
            if killed_after and batches.step > killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
            rows = [key for batch in micro_batches for key in row_keys(batch)]
            stream.write(json.dumps({"step": batches.step, "shard": batches.shard[0], "rows": rows}) + "\n")
            stream.flush()
            yield micro_batches

    StepBatches.__iter__ = watched  # pyright: ignore[reportAttributeAccessIssue]
    script = str(ROOT / "train.py")
    sys.argv = [script, *sys.argv[3:]]
    sys.path[0] = str(ROOT)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
