"""A run in a real S3 server, whose requests go wrong at random: no checkpoint is lost, and no damaged one accepted.

The lines that it adds to $SAMECURVE_FAULT_RESULTS are a section of benchmarks/reliability.md.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server
import s3_uploads
from harness import (
    ROOT,
    SAVE_EVERY,
    STEPS,
    Run,
    Workspace,
    append_result,
    largest_relative_difference,
    launch_command,
    relative_l2,
)
from s3_server import BUCKET, Proxy, Server
from started import Started

from samecurve.checkpoint.fetch import committed, fetch_newest, verify
from samecurve.checkpoint.manifest import DamagedManifest, folder_name, list_checkpoints, step_of
from samecurve.errors import SamecurveError, StorageError
from samecurve.storage import object_store
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.object_store import ObjectStore

pytestmark = [pytest.mark.full, pytest.mark.skipif(not s3_server.PACKAGES, reason=s3_server.MISSING)]

NUM_SESSIONS = int(os.environ.get("SAMECURVE_TEST_S3_SESSIONS", "60"))
STEPS_PER_SESSION = 3
WAYS = ("error", "throttled", "lost", "cut", "flipped")
URL = f"s3://{BUCKET}/run"
SECONDS = 300
ONE_ATTEMPT = {"AWS_MAX_ATTEMPTS": "1"}  # botocore's own; s3fs and ObjectStore repeat above it


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    with s3_server.server(tmp_path) as made:
        yield made


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with s3_server.proxy(server) as made:
        yield made


def store_at(port: int, monkeypatch) -> ObjectStore:
    """The store, for this process."""
    if s3_server.PACKAGES not in sys.path:
        monkeypatch.setattr(sys, "path", [*sys.path, s3_server.PACKAGES])
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", ONE_ATTEMPT["AWS_MAX_ATTEMPTS"])
    import fsspec

    given = {"endpoint_url": f"http://127.0.0.1:{port}", "key": s3_server.KEY_ID, "secret": s3_server.SECRET}
    files = fsspec.filesystem("s3", **given, use_listings_cache=False, skip_instance_cache=True)
    return ObjectStore(URL, files=files, retries=s3_uploads.RETRIES)


class Weather:
    """What happens to the requests of one session, as a seed decides.

    Each request goes wrong with this probability. In an outage, all do. kill_at: the number of the request at which the
    process is killed.
    """

    def __init__(
        self,
        draw: random.Random,
        ways: tuple[str, ...],
        probability: float,
        outage: range = range(0),
        kill_at: int | None = None,
    ):
        self.draw, self.ways, self.probability, self.outage, self.kill_at = draw, ways, probability, outage, kill_at
        self.count = 0

    @classmethod
    def drawn(cls, draw: random.Random, ways: tuple[str, ...], kill_at: int | None = None) -> Weather:
        begin = draw.randrange(80)
        outage = range(begin, begin + 50) if draw.random() < 0.25 else range(0)
        return cls(draw, ways, draw.choice([0.03, 0.1, 0.25]), outage, kill_at)

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


def step_number(name: str) -> int:
    return step_of(Path(name))


def run_session(proxy: Proxy, folder: Path) -> tuple[int, str]:
    """Returns the exit code and the output."""
    command = [sys.executable, str(Path(s3_uploads.__file__)), URL, str(folder), str(STEPS_PER_SESSION)]
    environment = {**os.environ, **s3_server.settings(proxy.port), **ONE_ATTEMPT}
    with open(folder.with_suffix(".txt"), "w+b") as said:
        proxy.victim = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        code = proxy.victim.wait(SECONDS)
        said.seek(0)
        return code, said.read().decode()


def damaged(run: Path, folder: Path) -> list[str]:
    """The committed checkpoints of a run directory that are not what was saved at their step."""
    found = list_checkpoints(LocalFileSystem(), run / "checkpoints") if run.exists() else []
    return [each.name for each in found if hashes(each) != truth(folder, step_of(each))]


def unreadable_and_wrong(store: ObjectStore, newest: int, folder: Path) -> tuple[list[str], list[str]]:
    """Of the checkpoints that are committed in the store: those that cannot be read, and those with other content.

    newest: the step of the last upload that came to its end. Of one that did not, the marker may be damaged: moto takes
    an upload that differs from its checksum, and the process was killed before it saw that.
    """
    unreadable, wrong = [], []
    for name in committed(store):
        here = folder / name
        here.mkdir(parents=True)
        try:
            verify(store, name, here)
        except (DamagedManifest, StorageError) as error:
            if step_number(name) <= newest:
                unreadable.append(f"{name}: {error}")
            continue
        if hashes(here) != truth(folder.parent, step_number(name)):
            wrong.append(name)
    return unreadable, wrong


def fetch_under_faults(store: ObjectStore, proxy: Proxy, weather: Weather, folder: Path) -> list[str]:
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
    draw, newest, run = random.Random(0), 0, tmp_path / "here0"
    for number in range(NUM_SESSIONS):
        if draw.random() < 0.3:  # elsewhere
            run = tmp_path / f"here{number}"
        proxy.broken.clear()
        proxy.choose = Weather.drawn(
            draw, (*WAYS, "late error"), draw.randrange(1, 90) if draw.random() < 0.5 else None
        )
        code, said = run_session(proxy, run)
        uploaded = set(map(int, re.findall(r"^uploaded (\d+)$", said, re.MULTILINE)))
        newest = max({newest, *uploaded})
        killed, ended = code == -signal.SIGKILL, "\nended" in said
        assert killed or ended or "Error: " in said, said
        unfinished = server.unfinished_uploads() if ended else []

        unreadable, wrong = unreadable_and_wrong(direct, newest, tmp_path / f"store{number}")
        anywhere = tmp_path / f"anywhere{number}"
        anywhere.mkdir()
        fetched = fetch_newest(direct, anywhere, print)
        if newest and (fetched is None or step_of(fetched) < newest):
            unreadable.append(f"{newest} is not there")
        wrong += damaged(anywhere, tmp_path)
        wrong += damaged(run, tmp_path)
        wrong += fetch_under_faults(broken, proxy, Weather.drawn(draw, WAYS), tmp_path / f"elsewhere{number}")
        record = {
            "kind": "store",
            "faults": {way: proxy.broken[way] for way in s3_server.WAYS if proxy.broken[way]},
            "requests": proxy.broken.total(),
            "commits": len(uploaded),
            "killed": killed,
            "given_up": said.count("not uploaded yet") + (not ended and not killed),
            "lost": len(unreadable),
            "accepted": len(wrong),
            "unfinished": len(unfinished),
        }
        append_result(record)
        print(number, code, record)
        assert not unreadable, f"{unreadable}\n{said}"
        assert not wrong, f"{wrong}\n{said}"
        assert not unfinished, f"{unfinished}\n{said}"
        assert s3_server.SECRET not in said and "Traceback" not in said, said
        for used in ("store", "anywhere", "elsewhere"):
            shutil.rmtree(tmp_path / f"{used}{number}", ignore_errors=True)
    assert newest > NUM_SESSIONS


def in_store(proxy: Proxy, workspace: Workspace, staging: Path, strategy: str, world: int) -> tuple[list[str], dict]:
    """Returns command and environment of the same run in the store, with a local folder of its own."""
    path = workspace.strategy(strategy)
    command = [*launch_command("torchrun", path, world, workspace.folder), str(workspace.recipe)]
    command += [f"output_dir={URL}", "batch.micro_batch_size=2", "--strategy", str(path)]
    return command, s3_server.settings(proxy.port) | {"SAMECURVE_STAGING": str(staging)}


def test_a_killed_run_goes_on_elsewhere_under_another_strategy(server, proxy, battery, tmp_path, monkeypatch):
    workspace, local = battery.workspace, Path("s3", BUCKET, "run")
    expected = workspace.run(None, 1, "batch.micro_batch_size=8")
    proxy.choose = Weather(random.Random(1), ("error", "late error", "throttled", "lost", "cut"), 0.1)
    here, elsewhere = tmp_path / "here" / local, tmp_path / "elsewhere" / local
    here.mkdir(parents=True)
    command, settings = in_store(proxy, workspace, tmp_path / "here", "zero2", 2)
    last = 3 * SAVE_EVERY  # it stays there, and goes on uploading
    environment = workspace.environment(**settings, SAMECURVE_FAULTS=f"step@{last + 3}:0:slow,step@{last + 4}:0:hang")
    started = Started(command, environment, here)
    started.wait_for(lambda: server.newest_step() > SAVE_EVERY, "an upload of its second checkpoint or of a later one")
    for process in started.all():
        process.kill()
    assert started.wait(), started.output
    killed = Run(here, 1, started.output).facts
    assert (killed["strategy"], killed["world_size"]) == ("zero2", 2)
    assert_no_credentials(started.output, here)
    shutil.rmtree(here)
    newest = server.newest_step()

    command, settings = in_store(proxy, workspace, tmp_path / "elsewhere", "fsdp", 3)
    # a scheduler's restart, which waits until the session that was killed counts as lost
    found = workspace.execute(command, elsewhere, **settings, SLURM_RESTART_COUNT="1")
    assert found.returncode == 0, found.output
    assert f"fetched {URL}/checkpoints/{folder_name(newest)}" in found.output
    assert f"resuming after step {newest}" in found.output
    assert (found.facts["strategy"], found.facts["world_size"]) == ("fsdp", 3)
    assert found.column("step") == expected.column("step")
    assert largest_relative_difference(found.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(found.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    assert relative_l2(found.weights, expected.weights) < 1e-4
    assert {f"run/checkpoints/{folder_name(STEPS)}/COMMITTED", "run/model/model.safetensors"} <= set(server.keys())
    assert server.unfinished_uploads() == [] and sum(proxy.broken[way] for way in s3_server.WAYS) > 10
    assert_no_credentials(found.output, elsewhere)
    store = store_at(server.port, monkeypatch)
    contents = [store.read(key.removeprefix("run/")) for key in server.keys()]
    assert contents and not [each for each in contents if each is None or s3_server.SECRET.encode() in each]


def assert_no_credentials(output: str, folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "run.json" in files
    for secret in (s3_server.SECRET, s3_server.KEY_ID):
        assert secret not in output
        assert not [path for path in files if secret.encode() in path.read_bytes()]
