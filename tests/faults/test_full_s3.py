"""A run in a real S3 server, whose requests go wrong at random: no checkpoint is lost, and no damaged one accepted.

The lines that it adds to $SAMECURVE_FAULT_RESULTS are a section of benchmarks/reliability.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server
import s3_uploads
from harness import ROOT, Workspace, append_result, largest_relative_difference, relative_l2
from s3_server import BUCKET, Proxy, Server
from started import Started

from samecurve.checkpoint.fetch import committed, fetch_newest
from samecurve.checkpoint.manifest import folder_name, list_checkpoints, step_of
from samecurve.errors import SamecurveError
from samecurve.storage import object_store
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.object_store import ObjectStore

pytestmark = [pytest.mark.full, pytest.mark.skipif(not s3_server.PACKAGES, reason=s3_server.MISSING)]

NUM_SESSIONS = int(os.environ.get("SAMECURVE_TEST_S3_SESSIONS", "60"))
STEPS_PER_SESSION = 3
URL = f"s3://{BUCKET}/run"
SECONDS = 300


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    with s3_server.server(tmp_path) as made:
        made.ask(method="PUT")
        yield made


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with s3_server.proxy(server) as made:
        yield made


def store_at(port: int, monkeypatch) -> ObjectStore:
    """The store, for this process."""
    if s3_server.PACKAGES not in sys.path:
        monkeypatch.setattr(sys, "path", [*sys.path, s3_server.PACKAGES])
    for name, value in s3_server.settings(port).items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return ObjectStore(URL, retries=s3_uploads.RETRIES)


class Weather:
    """What happens to the requests of one session, as a seed decides.

    Each request goes wrong with some probability. In an outage, all do for a while. kill_at: the number of the request
    at which the process is killed.
    """

    def __init__(self, draw: random.Random, ways: tuple[str, ...], kill_at: int | None = None):
        self.draw, self.ways, self.kill_at = draw, ways, kill_at
        self.count, self.probability = 0, draw.choice([0.03, 0.1, 0.25])
        begin = draw.randrange(80) if draw.random() < 0.25 else 10**9
        self.outage = range(begin, begin + 50)

    def __call__(self, method: str, path: str, size: int) -> str:
        self.count += 1
        if self.count == self.kill_at:
            return self.draw.choice(["killed", "killed after"])
        if self.count in self.outage:
            return self.draw.choice(["error", "throttled", "cut"])
        way = self.draw.choice(self.ways) if self.draw.random() < self.probability else ""
        return way if way != "flipped" or "?" not in path or "partNumber" in path else ""


def truth(folder: Path, step: int) -> dict[str, str]:
    """Hashes of the files that a session commits at this step."""
    run = folder / f"truth{step}"
    if not run.exists():
        run.mkdir()
        s3_uploads.commit_step(run, step)
    return hashes(run / "checkpoints" / folder_name(step))


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def run_session(proxy: Proxy, folder: Path) -> tuple[int, str]:
    """Returns the exit code and the output."""
    command = [sys.executable, str(Path(s3_uploads.__file__)), URL, str(folder), str(STEPS_PER_SESSION)]
    environment = {**os.environ, **s3_server.settings(proxy.port)}
    with open(folder.with_suffix(".txt"), "w+b") as said:
        proxy.victim = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        code = proxy.victim.wait(SECONDS)
        said.seek(0)
        return code, said.read().decode()


def damaged(run: Path, folder: Path) -> list[str]:
    """The committed checkpoints of a run directory that are not what was saved at their step."""
    found = list_checkpoints(LocalFileSystem(), run / "checkpoints") if run.exists() else []
    return [each.name for each in found if hashes(each) != truth(folder, step_of(each))]


def accepted_under_faults(store: ObjectStore, proxy: Proxy, weather: Weather, folder: Path) -> list[str]:
    """Fetch the newest checkpoint while requests go wrong; return what appeared and is damaged."""
    folder.mkdir()
    proxy.choose = weather
    try:
        fetch_newest(store, folder, print)
    except SamecurveError as error:
        print(f"not fetched: {error}")
    return damaged(folder, folder.parent)


def test_no_committed_checkpoint_is_lost_and_no_damaged_one_accepted(server, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", s3_uploads.PART_BYTES)
    direct, broken = store_at(server.port, monkeypatch), store_at(proxy.port, monkeypatch)
    draw, uploaded, run = random.Random(0), 0, tmp_path / "here0"
    for number in range(NUM_SESSIONS):
        if draw.random() < 0.3:  # elsewhere
            run = tmp_path / f"here{number}"
        proxy.broken.clear()
        ways = ("error", "late error", "throttled", "lost", "cut", "flipped")
        proxy.choose = Weather(draw, ways, draw.randrange(1, 90) if draw.random() < 0.5 else None)
        code, said = run_session(proxy, run)
        uploaded = max([uploaded, *map(int, re.findall(r"^uploaded (\d+)$", said, re.MULTILINE))])
        killed, ended = code == -signal.SIGKILL, "\nended" in said
        assert killed or ended or "Error: " in said, said
        unfinished = len(server.unfinished_uploads()) if ended else 0

        elsewhere = tmp_path / f"elsewhere{number}"
        elsewhere.mkdir()
        newest = fetch_newest(direct, elsewhere, print)
        accepted = damaged(elsewhere, tmp_path) + damaged(run, tmp_path)
        happened = Counter(proxy.broken)
        weather = Weather(draw, ("error", "throttled", "lost", "cut", "flipped"))
        accepted += accepted_under_faults(broken, proxy, weather, tmp_path / f"again{number}")
        happened.update(proxy.broken - happened)
        record = {
            "kind": "store",
            "faults": {way: happened[way] for way in s3_server.WAYS if happened[way]},
            "requests": happened.total(),
            "commits": said.count("uploaded"),
            "given_up": said.count("not uploaded yet") + (not ended and not killed),
            "lost": int(uploaded > 0 and (newest is None or step_of(newest) < uploaded)),
            "accepted": len(accepted),
            "unfinished": unfinished,
        }
        append_result(record)
        print(number, code, record)
        assert not record["lost"], f"{uploaded} was uploaded and {newest} is the newest\n{said}"
        assert not accepted, said
        assert not unfinished, said
        assert s3_server.SECRET not in said
    assert uploaded > NUM_SESSIONS and committed(direct)
