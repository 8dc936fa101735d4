"""Print what mlflow and wandb hold of a run, read by their own packages: {tracker: {tag: {step: value}}}.

Run with the packages on the path, and with RUN_DIRECTORY and the tracking URI of mlflow. wandb 0.31 reads its offline
files in a program of its own, so the frames around its records are taken apart here: a header of 7 bytes, then blocks
of 32 KiB as in LevelDB's log (github.com/google/leveldb, doc/log_format.md).
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import mlflow
from wandb.proto import wandb_internal_pb2

HEADER, BLOCK, FRAME = 7, 32 * 1024, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def of_mlflow(uri: str, run_id: str) -> dict[str, dict[int, float]]:
    client = mlflow.MlflowClient(uri)
    tags = client.get_run(run_id).data.metrics
    return {tag: {each.step: each.value for each in client.get_metric_history(run_id, tag)} for tag in tags}


def of_wandb(folder: Path, run_id: str) -> dict[str, dict[int, float]]:
    found = defaultdict(dict)
    for path in sorted(folder.rglob(f"run-{run_id}.wandb"), key=lambda path: path.stat().st_mtime):  # of each session
        for content in frames(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = int(values["_step"])
                for tag in (tag for tag in values if not tag.startswith("_")):
                    found[tag][step] = json.loads(values[tag])
    return found


def frames(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B", data[:HEADER]
    place, record = HEADER, b""
    while place < len(data):
        left = BLOCK - place % BLOCK
        if left < FRAME:  # padding
            place += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + FRAME : place + FRAME + length]
        place += FRAME + length
        if kind in (FULL, LAST):
            yield record
            record = b""


if __name__ == "__main__":
    directory, uri = Path(sys.argv[1]), sys.argv[2]
    ids = json.loads((directory / "trackers" / "runs.json").read_text())
    read = {"mlflow": of_mlflow(uri, ids["mlflow"]), "wandb": of_wandb(directory / "trackers", ids["wandb"])}
    print("READ " + json.dumps(read))
