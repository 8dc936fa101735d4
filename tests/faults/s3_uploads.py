"""A session of a run that trains nothing: fetches the newest checkpoint of a store, commits some and uploads them.

python s3_uploads.py URL FOLDER NUM_STEPS       prints "uploaded STEP" once a checkpoint is committed in the store
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from samecurve.checkpoint import commit
from samecurve.checkpoint.fetch import fetch_newest
from samecurve.checkpoint.manifest import list_checkpoints, step_of
from samecurve.checkpoint.mirror import Mirror
from samecurve.errors import SamecurveError
from samecurve.storage import object_store
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.object_store import ObjectStore, Retries

KEEP = 2
PART_BYTES = 5 << 20  # the smallest that S3 takes
SIZES = {"rank_00000.safetensors": (11 << 20) + 7, "rank_00001.safetensors": 3_000}  # three parts, and one request
RETRIES = Retries(attempts=4, first_seconds=0.05, most_seconds=0.2)


class Alone:
    def conclude(self, value, conclusion):
        return conclusion([value])


def commit_step(run: Path, step: int) -> None:
    """Commit a checkpoint whose content is a function of the step."""
    files, draw = LocalFileSystem(), random.Random(step)

    def write(folder: Path):
        return [commit.write_file(files, folder / name, [draw.randbytes(size)]) for name, size in SIZES.items()], None

    content = commit.Content(step, sum(SIZES.values()), write, lambda notes: {"state.json": b'{"step": %d}' % step})
    commit.commit(files, run / "checkpoints", content, Alone().conclude, 0)


def session(store: ObjectStore, run: Path, num_steps: int) -> None:
    run.mkdir(exist_ok=True)
    fetch_newest(store, run, print)
    found = list_checkpoints(LocalFileSystem(), run / "checkpoints")
    start = step_of(found[0]) if found else 0
    mirror = Mirror(store, run, KEEP, print)
    mirror.start(start)
    for step in range(start + 1, start + num_steps + 1):
        commit_step(run, step)
        commit.rotate(LocalFileSystem(), run / "checkpoints", KEEP, ())
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {each}}}\n' for each in range(1, step + 1)))
        try:
            mirror.catch_up()
            print(f"uploaded {step}", flush=True)
        except SamecurveError as error:
            print(f"not uploaded yet: {error}", flush=True)
    mirror.finish()
    print(f"uploaded {start + num_steps}\nended", flush=True)


def main() -> None:
    url, folder, num_steps = sys.argv[1:]
    object_store.PART_BYTES = PART_BYTES
    try:
        session(ObjectStore(url, retries=RETRIES), Path(folder), int(num_steps))
    except SamecurveError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
