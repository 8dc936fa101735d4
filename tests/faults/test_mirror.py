"""The copy of a run in an object store: each request of an upload or a fetch fails in every way.

The store is fsspec's own in memory, behind a proxy that breaks one request. No checkpoint is lost (one that was
committed in the store can be fetched at any later time, until two newer ones are), and none is accepted that is not,
byte for byte, one that was committed locally.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tiny_recipes import make_recipe

from samecurve.checkpoint import commit, mirror
from samecurve.checkpoint import fetch as fetching
from samecurve.checkpoint.fetch import (
    HISTORY,
    committed,
    fetch_best,
    fetch_newest,
    read_owner,
    read_sessions,
    take_over,
)
from samecurve.checkpoint.manager import TrainProgress
from samecurve.checkpoint.manifest import MANIFEST, check_files, folder_name, list_checkpoints
from samecurve.errors import CheckpointError, ConfigurationError, DataError, Preempted, StorageError
from samecurve.run.lifecycle import supervised
from samecurve.run.run_directory import RunDirectory
from samecurve.storage import ending, object_store
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.object_store import ObjectStore, Retries
from samecurve.strategy.launchers import continues_own_run
from samecurve.training.startup import open_run

REQUESTS = ("ls", "cat_file", "rm_file", "pipe_file", "info", "open")
WAYS = ("error", "lost", "cut", "flipped", "killed", "killed after")
# every day each request fails in one way, and each way comes; the full tests have all of both
every_way = pytest.mark.parametrize("ways", [WAYS, *(pytest.param((way,), marks=pytest.mark.full) for way in WAYS)])
AT_ONCE = Retries(attempts=3, first_seconds=0, most_seconds=0)
KEEP = 2


class Killed(BaseException):
    """The process ends here."""


class Breaking:
    """fsspec's file system in memory, whose request number `at` goes wrong.

    how: error (no effect), lost (takes effect, no answer), cut (half of the bytes), flipped (a bit; reported as good),
        killed (before it), killed after (after it).
    """

    def __init__(self, how: str = "", at: int = -1):
        self.files, self.how, self.at, self.count = MemoryFileSystem(), how, at, 0

    def __getattr__(self, name: str):
        found = getattr(self.files, name)
        return (lambda *given, **options: self._request(name, found, given, options)) if name in REQUESTS else found

    def _request(self, name: str, call: Callable, given: tuple, options: dict):
        self.count += 1
        if self.count != self.at + 1:
            return call(*given, **options)
        if self.how == "killed":
            raise Killed
        if self.how == "error":
            raise OSError("503 SlowDown")
        if name == "pipe_file" and self.how in ("cut", "flipped"):
            path, content = given
            content = content[: len(content) // 2] if self.how == "cut" else content[:-1] + bytes([content[-1] ^ 1])
            call(path, content)
            if self.how == "flipped":
                return None
            raise ConnectionResetError("cut in the middle")
        answer = call(*given, **options)
        if self.how == "killed after":
            raise Killed
        if name == "cat_file" and self.how in ("cut", "flipped"):
            return answer[:-1] if self.how == "cut" else answer[:-1] + bytes([answer[-1] ^ 1])
        if self.how == "flipped":
            return answer
        raise ConnectionResetError("the answer was lost")


class Alone:
    def conclude(self, value, conclusion):
        return conclusion([value])


def commit_step(run: Path, step: int, session: str = "") -> None:
    files = LocalFileSystem()

    def write(folder: Path):
        chunks = [f"{session}{step} ".encode() * 99]
        return [commit.write_file(files, folder / "rank_00000.safetensors", chunks)], None

    content = commit.Content(step, 99, write, lambda notes: {"state.json": b'{"step": %d}' % step})
    commit.commit(files, run / "checkpoints", content, Alone().conclude, 0)


def new_run(path: Path, *steps: int) -> Path:
    path.mkdir()
    for step in steps:
        commit_step(path, step)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def url() -> Iterator[str]:
    yield f"memory://{uuid.uuid4().hex}/run"
    MemoryFileSystem.store.clear()


@pytest.fixture(autouse=True)
def ends(monkeypatch) -> None:
    """What a test's mirrors would do at the end of the process."""
    monkeypatch.setattr(ending, "_calls", [])


def store_at(url: str, files=None) -> ObjectStore:
    return ObjectStore(url, files=files or MemoryFileSystem(), retries=AT_ONCE)


def mirror_of(url: str, run: Path, files=None) -> mirror.Mirror:
    return mirror.Mirror(store_at(url, files), run, KEEP, print)


def upload_three(url: str, run: Path, files=None) -> int:
    """Upload three checkpoints as they are committed, the oldest of which rotation removes. Returns the last that is
    known to be in the store."""
    done = 0
    try:
        for step in (10, 20, 30):
            commit_step(run, step)
            commit.rotate(LocalFileSystem(), run / "checkpoints", KEEP, ())
            mirror_of(url, run, files).catch_up()
            done = step
    except (Killed, StorageError):
        pass
    return done


def fetched(url: str, folder: Path) -> Path | None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return fetch_newest(store_at(url), folder, print)


@every_way
def test_no_fault_of_an_upload_loses_a_checkpoint_or_gets_one_accepted(ways, url, tmp_path):
    counting = Breaking()
    upload_three(url, new_run(tmp_path / "whole"), counting)
    truth = {f"step_{step:08d}": {} for step in (10, 20, 30)}
    for step in (10, 20, 30):
        commit_step(new_run(tmp_path / f"truth{step}"), step)
        truth[folder_name(step)] = contents(tmp_path / f"truth{step}" / "checkpoints" / folder_name(step))
    assert counting.count > 40
    for at in range(counting.count):
        how = ways[at % len(ways)]
        MemoryFileSystem.store.clear()
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        done = upload_three(url, new_run(run), Breaking(how, at))
        found = fetched(url, tmp_path / "elsewhere")
        assert found is not None or done == 0, f"request {at}: the checkpoint of step {done} is lost"
        if found is not None:
            assert int(found.name[5:]) >= done, f"request {at}"
            assert contents(found) == truth[found.name], f"request {at}"
        if not how.startswith("killed"):
            assert done == 30, f"request {at}: one fault was not repeated"
        mirror_of(url, run).catch_up()  # the next session
        newest = max(folder.name for folder in (run / "checkpoints").glob("step_*"))
        again = fetched(url, tmp_path / "elsewhere")
        assert again is not None and again.name == newest, f"request {at}"


@every_way
def test_no_fault_of_a_fetch_gets_a_damaged_checkpoint_accepted(ways, url, tmp_path):
    run = new_run(tmp_path / "run", 10, 20)
    for name in HISTORY:
        (run / name).write_text(f"{name}\n")
    mirror_of(url, run).catch_up()
    counting = Breaking()
    fetch_newest(store_at(url, counting), new_run(tmp_path / "whole"), print)
    assert counting.count > 8
    for at in range(counting.count):
        how = ways[at % len(ways)]
        here = tmp_path / f"here{at}"
        here.mkdir()
        try:
            fetch_newest(store_at(url, Breaking(how, at)), here, print)
        except Killed:
            assert how.startswith("killed")
        for folder in (here / "checkpoints").glob("step_*"):
            assert contents(folder) == contents(run / "checkpoints" / folder.name), f"request {at}"
        if not how.startswith("killed"):
            assert (here / "checkpoints" / folder_name(20)).exists(), f"request {at}"
        fetch_newest(store_at(url), here, print)  # the next start gets the newest, and the records before it
        assert check_files(LocalFileSystem(), here / "checkpoints" / folder_name(20)) == []
        if how != "flipped":  # records have no hash
            assert [(here / name).read_text() for name in HISTORY] == [f"{name}\n" for name in HISTORY], f"request {at}"


def test_a_file_in_parts_is_discarded_after_a_failure(url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", 64)
    run = new_run(tmp_path / "run", 10)
    discarded = []
    monkeypatch.setattr(object_store, "_discard", discarded.append)
    files, opened = MemoryFileSystem(), []

    class Failing:
        def __getattr__(self, name):
            return getattr(files, name)

        def open(self, *given, **options):
            file = files.open(*given, **options)
            opened.append(file)
            if len(opened) == 1:
                file.commit = lambda: (_ for _ in ()).throw(ConnectionResetError("lost"))
            return file

    mirror_of(url, run, Failing()).catch_up()
    assert discarded == opened[:1] and len(opened) > 1
    found = fetched(url, tmp_path / "elsewhere")
    assert found is not None and contents(found) == contents(run / "checkpoints" / found.name)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_uploads_that_nobody_finishes_are_aborted(error, url, tmp_path):
    """Of a killed process, or whose first answer was lost: S3 keeps their parts, and bills them."""
    aborted = []

    class Listing(Breaking):
        def call_s3(self, method, **given):
            if method == "list_multipart_uploads":
                return {"Uploads": [{"Key": f"{given['Prefix']}{number}", "UploadId": number} for number in (1, 2)]}
            aborted.append((given["Key"].rpartition("/")[2], given["UploadId"]))
            raise error("aborted already, or not ours to abort")

    mirror_of(url, new_run(tmp_path / "run", 10), Listing()).catch_up()  # which has done its own work
    assert aborted == [("1", 1), ("2", 2)] if error is FileNotFoundError else [("1", 1)]


def test_a_damaged_checkpoint_is_skipped_and_if_all_are_the_start_is_refused(url, tmp_path):
    mirror_of(url, new_run(tmp_path / "run", 10, 20)).catch_up()
    store = store_at(url)
    store.write("checkpoints/step_00000020/rank_00000.safetensors", b"other")
    found = fetched(url, tmp_path / "elsewhere")
    assert found is not None and found.name == folder_name(10)
    store.remove("checkpoints/step_00000010/state.json")
    with pytest.raises(CheckpointError, match=r"step_00000020/rank_00000.safetensors: expected .* bytes, found 5"):
        fetched(url, tmp_path / "elsewhere")


class FlexibleChecksumError(Exception):
    """What botocore raises, under its name."""


def test_a_marker_that_a_killed_session_left_damaged_stops_nobody(url, tmp_path):
    """S3 refuses an upload that differs from its checksum; other stores take both and show them to each reader."""
    run = new_run(tmp_path / "run", 10, 20)
    mirror_of(url, run).catch_up()
    marker = f"checkpoints/{folder_name(20)}/COMMITTED"
    good = store_at(url).read(marker)
    store_at(url).write(marker, b"damaged")

    class Checking(Breaking):
        def cat_file(self, path, **options):
            content = self.files.cat_file(path, **options)
            if content == b"damaged":
                raise FlexibleChecksumError("Expected checksum kWPcQQ== did not match calculated checksum: 5mTs1w==")
            return content

    found = fetch_newest(store_at(url, Checking()), new_run(tmp_path / "elsewhere"), print)
    assert found is not None and found.name == folder_name(10)
    mirror_of(url, run, Checking()).catch_up()  # the next session
    assert store_at(url).read(marker) == good
    store_at(url).write(marker, b"damaged")
    mirror_of(url, new_run(tmp_path / "other", 10), Checking()).start(10)
    assert marker.rpartition("/")[2] not in store_at(url).folders(f"checkpoints/{folder_name(20)}")


def test_a_damaged_local_checkpoint_is_fetched_again(url, tmp_path):
    """The damage is in a rank's file, whose size stayed."""
    run = new_run(tmp_path / "run", 10, 20)
    mirror_of(url, run).catch_up()
    file = run / "checkpoints" / folder_name(20) / "rank_00000.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert fetch_newest(store_at(url), run, print) == file.parent
    assert file.read_bytes() == good


def test_a_newer_local_checkpoint_is_kept(url, tmp_path):
    run = new_run(tmp_path / "run", 10)
    mirror_of(url, run).catch_up()
    commit_step(run, 20)
    assert fetch_newest(store_at(url), run, print) is None


def test_later_checkpoints_of_another_session_are_set_aside(url, tmp_path):
    """As the local ones, which move to previous/: they would be newer than those of this session."""
    mirror_of(url, new_run(tmp_path / "run", 10, 20)).catch_up()
    run = new_run(tmp_path / "other", 10)
    going_on = mirror_of(url, run)
    going_on.start(10)
    going_on.offer()
    commit_step(run, 15)
    going_on.finish()
    found = fetched(url, tmp_path / "elsewhere")
    assert found is not None and found.name == folder_name(15)
    assert store_at(url).read(f"checkpoints/{folder_name(20)}/{mirror.SET_ASIDE}")
    commit_step(run, 20)  # until this session has reached the step, too
    mirror_of(url, run).catch_up()
    assert store_at(url).read(f"checkpoints/{folder_name(20)}/{mirror.SET_ASIDE}") is None


def test_a_start_that_goes_back_does_so_in_the_store_before_it_does_locally(url, tmp_path, monkeypatch):
    """Otherwise a restart in between would go on from the store's later checkpoint."""
    run = new_run(tmp_path / "run", 10, 20)
    directory = RunDirectory(run, resume=str(run / "checkpoints" / folder_name(10)))
    recipe = make_recipe(tmp_path, "data.jsonl", steps=10, checkpoint={"mirror": url})
    context: Any = SimpleNamespace(
        recipe=recipe,
        run=directory,
        progress=SimpleNamespace(log=print),
        world=SimpleNamespace(is_main=True),
        plan=SimpleNamespace(fresh=False),
        watch=SimpleNamespace(local_progress=None),
    )
    monkeypatch.setattr(mirror.Mirror, "_sign", lambda *given, **options: (_ for _ in ()).throw(StorageError("down")))
    nothing: Any = SimpleNamespace(task=None)
    with pytest.raises(StorageError, match="down"):
        open_run(context, nothing, nothing, nothing, TrainProgress(step=10))
    directory.close()
    assert len(list_checkpoints(LocalFileSystem(), run / "checkpoints")) == 2
    assert not continues_own_run({"TORCHELASTIC_RESTART_COUNT": "1"}, str(run))


def test_the_store_keeps_as_many_and_what_is_kept_locally(url, tmp_path):
    run = new_run(tmp_path / "run", 10, 20, 30, 40)
    mirror_of(url, run).catch_up()
    store_at(url).write("checkpoints/step_00000005/state.json", b"an upload that was given up")
    shutil.rmtree(run / "checkpoints" / folder_name(20))  # rotated; 10 is the best, which is protected
    mirror_of(url, run).catch_up()
    assert sorted(store_at(url).folders("checkpoints")) == [folder_name(step) for step in (10, 30, 40)]


def test_a_replacement_that_a_kill_cut_in_two_is_finished(tmp_path):
    """Of the checkpoint that a run resumed from and saved again, with an evaluation that was missing."""
    run, files = new_run(tmp_path / "run", 10), LocalFileSystem()
    folder = run / "checkpoints" / folder_name(10)
    expected = contents(folder)
    shutil.copytree(folder, folder.with_name(f"{commit.PARTIAL}{folder.name}"))
    folder.rename(folder.with_name(f"{commit.DELETED}{folder.name}"))
    started = RunDirectory(run, resume="auto")
    assert started.continues and list_checkpoints(files, run / "checkpoints") == [folder]
    assert contents(folder) == expected
    started.close()


def test_the_best_checkpoint_of_a_lost_machine_stays(url, tmp_path):
    """Neither a session elsewhere that has fetched it removes it from the store, nor one that has not."""
    run = new_run(tmp_path / "run", 10, 30, 40)
    (run / "checkpoints" / "best.json").write_text(json.dumps({"checkpoint": folder_name(10), "eval_loss": 1.5}))
    mirror_of(url, run).catch_up()
    for with_best in (False, True):
        other = tmp_path / f"other{with_best}"
        assert fetched(url, other).name == folder_name(40 + 10 * with_best)
        if with_best:
            fetch_best(store_at(url), other, print)
            assert contents(other / "checkpoints" / folder_name(10)) == contents(run / "checkpoints" / folder_name(10))
        commit_step(other, 50 + 10 * with_best)
        mirror_of(url, other).catch_up()
        assert folder_name(10) in store_at(url).folders("checkpoints")


def test_a_session_elsewhere_goes_on_with_the_same_tracked_runs(url, tmp_path):
    run = new_run(tmp_path / "run", 10)
    (run / "trackers").mkdir()
    (run / "trackers" / "runs.json").write_text('{"wandb": "abc"}')
    mirror_of(url, run).catch_up()
    assert fetched(url, tmp_path / "other") is not None
    assert (tmp_path / "other" / "trackers" / "runs.json").read_text() == '{"wandb": "abc"}'


def test_a_log_that_grows_while_it_is_sent_is_sent_as_it_was(url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", 64)
    log, files = tmp_path / "metrics.jsonl", MemoryFileSystem()
    log.write_bytes(b"a" * 200)

    class Growing:
        def __getattr__(self, name):
            return getattr(files, name)

        def open(self, *given, **options):
            with open(log, "ab") as grown:
                grown.write(b"b" * 70)
            return files.open(*given, **options)

    store_at(url, Growing()).upload(log, "metrics.jsonl")
    assert store_at(url).read("metrics.jsonl") == b"a" * 200


def test_the_end_of_a_run_says_what_the_store_lacks(url, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")

    class Down:
        def __getattr__(self, name):
            raise OSError("403 for wJalrXUtnFEMI")

        def _strip_protocol(self, url):
            return url

    run = new_run(tmp_path / "run", 10)
    with pytest.raises(StorageError) as failed:
        mirror_of(url, run, Down()).finish()
    assert "lacks step_00000010" in str(failed.value)
    assert "wJalrXUtnFEMI" not in str(failed.value) and "***" in str(failed.value)


def test_records_are_uploaded_when_they_have_changed(tmp_path, url, monkeypatch):
    """Traces and exports are large, and each checkpoint looks at all of them."""
    run, sent = new_run(tmp_path / "run", 1), []
    write = ObjectStore.write
    monkeypatch.setattr(ObjectStore, "write", lambda self, key, content: (sent.append(key), write(self, key, content)))
    (run / "profile").mkdir()
    (run / "profile" / "trace.json").write_text("{}")
    (run / "metrics.jsonl").write_text("1\n")
    copies = mirror_of(url, run)
    copies.catch_up()
    assert {"profile/trace.json", "metrics.jsonl"} <= set(sent)
    sent.clear()
    (run / "metrics.jsonl").write_text("1\n2\n")
    copies.catch_up()
    assert sent == ["metrics.jsonl"]
    assert store_at(url).read("metrics.jsonl") == b"1\n2\n"


def test_a_model_replaces_all_of_an_earlier_one(tmp_path, url):
    """Readers take model.safetensors where both it and an index are there."""
    run = new_run(tmp_path / "run", 1)
    for names in (("config.json", "model.safetensors"), ("config.json", "model.safetensors.index.json", "1_Pooling/a")):
        shutil.rmtree(run / "model", ignore_errors=True)
        for name in names:
            (run / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (run / "model" / name).write_text(name)
        mirror_of(url, run).catch_up()
        assert sorted(store_at(url).folders("model")) == sorted(name.partition("/")[0] for name in names)
    shutil.rmtree(run / "model")  # as the next session begins
    mirror_of(url, run).catch_up()
    assert len(store_at(url).folders("model")) == 3


def test_only_the_directory_that_has_a_model_starts_over_beside_its_copy(tmp_path, url):
    """Which moves it to previous/. From another one it would be lost."""
    run, other = new_run(tmp_path / "run", 10), new_run(tmp_path / "other")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    finished = mirror_of(url, run)
    finished.start(10)
    finished.finish()
    for continues in (False, True):
        if continues:
            take_over(store_at(url), other, fresh=False)  # the model was not fetched
        with pytest.raises(ConfigurationError, match="has the trained model .*; choose another URL") as refused:
            take_over(store_at(url), other, fresh=True)
        assert refused.value.exit_code == 2
    shutil.rmtree(run / "model")
    for _ in range(2):  # the second one is a restart
        take_over(store_at(url), run, fresh=True)
        mirror_of(url, run).start(0, fresh=True)


def test_a_live_run_keeps_its_store_and_an_ended_one_leaves_it_to_its_own_run(url, tmp_path, monkeypatch):
    first = mirror_of(url, new_run(tmp_path / "first", 10))
    take_over(store_at(url), tmp_path / "first", fresh=False)
    first.start(10)
    elsewhere, other = new_run(tmp_path / "elsewhere"), new_run(tmp_path / "other", 10)
    for run in (elsewhere, other):
        for fresh in (False, True):
            with pytest.raises(ConfigurationError, match=rf"uploads to {url}; choose another URL") as refused:
                take_over(store_at(url), run, fresh)
            assert refused.value.exit_code == 2
    take_over(store_at(url), tmp_path / "first", fresh=False)  # the same folder, whose lock tells who is alive
    first.finish()
    take_over(store_at(url), elsewhere, fresh=False)  # resumes there, and may come back
    mirror_of(url, elsewhere).start(10)
    monkeypatch.setattr(fetching, "LIVE_SECONDS", 0)  # its host is lost
    take_over(store_at(url), tmp_path / "first", fresh=False)
    with pytest.raises(ConfigurationError, match="belongs to another run"):
        take_over(store_at(url), other, fresh=False)
    take_over(store_at(url), other, fresh=True)
    mirror_of(url, other).start(10)
    with pytest.raises(ConfigurationError, match="belongs to another run"):
        take_over(store_at(url), elsewhere, fresh=False)


@pytest.mark.parametrize("error", [DataError("no rows"), StorageError("a full disk"), ValueError("x"), Preempted("x")])
def test_a_run_that_failed_leaves_its_store_at_once(error, url, tmp_path):
    run, elsewhere = tmp_path / "run", new_run(tmp_path / "elsewhere")
    commit_step(new_run(run), 10)
    with contextlib.suppress(type(error)), supervised(RunDirectory(run, resume="auto")):
        first = mirror_of(url, run)
        first.start(10)
        with pytest.raises(ConfigurationError, match="uploads to"):
            take_over(store_at(url), elsewhere, fresh=False)
        raise error
    assert not read_owner(store_at(url))["live"]
    take_over(store_at(url), elsewhere, fresh=False)
    mirror_of(url, elsewhere).start(10)
    first.sign_off()  # of a session whose place was taken, that changes nothing
    with pytest.raises(ConfigurationError, match="uploads to"):
        take_over(store_at(url), run, fresh=False)


def test_the_end_of_a_failed_session_is_not_that_of_the_one_after_it(url, tmp_path):
    run, copy = new_run(tmp_path / "run", 10), tmp_path / "copy"
    mirror_of(url, run).start(10)
    shutil.copytree(run, copy)
    mirror_of(url, copy).start(10)
    del ending._calls[1:]
    ending.sign_off()
    assert read_owner(store_at(url))["live"]


def test_a_restart_says_for_whom_it_waits_and_how_long(url, tmp_path, monkeypatch, capsys):
    mirror_of(url, new_run(tmp_path / "run", 10)).start(10)
    monkeypatch.setattr(fetching, "POLL_SECONDS", 0.05)
    deadline = time.monotonic() + 0.3
    latest = [time.strftime("%H:%M:%S", time.localtime(time.time() + seconds)) for seconds in (0, 1, 2)]
    with pytest.raises(ConfigurationError, match="uploads to"):
        take_over(store_at(url), new_run(tmp_path / "elsewhere"), fresh=False, deadline=deadline)
    [line] = capsys.readouterr().out.splitlines()
    assert f"uploads to {url}; waiting until it ends there or counts as lost" in line
    assert line.rpartition("latest until ")[2] in latest


@pytest.mark.parametrize("is_link", [False, True])
def test_what_a_link_leads_to_outside_of_the_run_is_not_uploaded(is_link, url, tmp_path, capsys):
    real = new_run(tmp_path / "real", 10)
    private = tmp_path / "private"
    (private / "deep").mkdir(parents=True)
    for name in ("id_rsa", "config.json", "deep/x"):
        (private / name).write_text("a secret")
    run = tmp_path / "run" if is_link else real
    if is_link:  # the whole directory may lie elsewhere
        run.symlink_to(real)
    for folder in ("tensorboard", "trackers"):
        (run / folder).mkdir()
    (run / "metrics.jsonl").write_text("{}")
    (run / "tensorboard" / "events").write_text("own")
    (run / "trackers" / "latest").symlink_to(run / "tensorboard" / "events")
    (run / "trackers" / "loop").symlink_to("loop")
    outside = {"tensorboard/n.txt": "id_rsa", "tensorboard/all": "deep", "model": "", "run.json": "id_rsa"}
    outside |= {"trackers/broken": "nothing", "checkpoints/best.json": "config.json"}
    for name, target in outside.items():
        (run / name).symlink_to(private / target)
    store_at(url).write("model/config.json", b"of an earlier session")
    copies = mirror_of(url, run)
    for _ in range(2):
        copies.catch_up()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(outside)
    for name, target in outside.items():
        assert sum(f"{run / name} is not uploaded: a link to {private / target}," in line for line in said) == 1
    root = MemoryFileSystem().find(url.removeprefix("memory:/"))
    keys = {path.partition("/run/")[2] for path in root}
    assert {"metrics.jsonl", "tensorboard/events", "trackers/latest", "model/config.json"} <= keys
    assert not any(b"secret" in MemoryFileSystem().cat_file(path) for path in root)


def test_checkpoints_may_lie_on_another_disk(url, tmp_path):
    run = new_run(tmp_path / "run", 10)
    (run / "checkpoints" / "best.json").write_text(json.dumps({"checkpoint": folder_name(10)}))
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    mirror_of(url, run).catch_up()
    assert committed(store_at(url)) == [folder_name(10)] and fetching.best_name(store_at(url)) == folder_name(10)


def test_a_refused_fresh_start_leaves_the_run_its_store(url, tmp_path, monkeypatch):
    run, copy = new_run(tmp_path / "run", 10), tmp_path / "copy"
    first = mirror_of(url, run)
    first.start(10)
    first.finish()
    shutil.copytree(run, copy)
    take_over(store_at(url), run, fresh=True)  # then its data was refused
    take_over(store_at(url), run, fresh=False)
    for how in ("killed", "killed after"):
        for at in range(3):  # of the requests that make it the owner
            with pytest.raises(Killed):
                mirror_of(url, run, Breaking(how, at)).start(0, fresh=True)
            take_over(store_at(url), run, fresh=False)
    mirror_of(url, run).start(0, fresh=True)
    take_over(store_at(url), run, fresh=True)  # a restart, while the session before it counts as alive
    monkeypatch.setattr(fetching, "LIVE_SECONDS", 0)
    with pytest.raises(ConfigurationError, match="belongs to another run"):
        take_over(store_at(url), copy, fresh=False)


@pytest.mark.parametrize("resume", ["none", "runs/first/checkpoints/step_00000010"])
def test_a_new_directory_continues_the_stores_run_only_where_it_resumes_from_the_store(resume, url, tmp_path):
    first = mirror_of(url, new_run(tmp_path / "first", 10))
    first.start(10)
    first.finish()
    fork = new_run(tmp_path / "fork")
    recipe: Any = SimpleNamespace(checkpoint=SimpleNamespace(mirror=url, best=None), output_dir=fork)
    for _ in range(2):  # the first try leaves nothing that lets the second one in
        with pytest.raises(ConfigurationError, match=f"to another run, .*--resume {resume} does not") as refused:
            fetching.fetch(recipe, resume, fresh=False)
        assert refused.value.exit_code == 2
    fetching.fetch(recipe, "auto", fresh=False)
    assert (fork / "checkpoints" / folder_name(10)).is_dir()


@pytest.mark.parametrize("seen_by", ["its sign of life", "an upload", "the marker of an upload"])
def test_of_two_sessions_of_one_run_the_later_one_uploads(seen_by, url, tmp_path, monkeypatch, capsys):
    """In a copy of the directory, which is in the middle of the run as far as it knows."""
    run, copy = new_run(tmp_path / "run", 10), tmp_path / "copy"
    first = mirror_of(url, run)
    if seen_by == "its sign of life":
        monkeypatch.setattr(mirror, "SIGN_SECONDS", 0.01)
    first.start(10)
    first.catch_up()
    shutil.copytree(run, copy)

    def start_second() -> None:
        take_over(store_at(url), copy, fresh=False)
        mirror_of(url, copy).start(10)

    def upload(self, path: Path, key: str) -> None:
        upload_as_is(self, path, key)
        if path.name == MANIFEST:
            start_second()

    commit_step(run, 20, "first")
    if seen_by == "the marker of an upload":
        upload_as_is = ObjectStore.upload
        monkeypatch.setattr(ObjectStore, "upload", upload)
    else:
        start_second()
    if seen_by == "its sign of life":
        assert first._owner_thread is not None
        first._owner_thread.join(5)
        assert first._is_lost
    with pytest.raises(StorageError, match=f"lacks {folder_name(20)}: another run uploads there"):
        first.finish()
    assert capsys.readouterr().out.count(f"uploads to {url}; this one uploads no more, and keeps its") == 1
    assert committed(store_at(url)) == [folder_name(10)]
    owner = read_owner(store_at(url))
    assert owner["live"] and owner["session"] == read_sessions(copy / ".mirror_owner")[-1]
    with pytest.raises(ConfigurationError, match=rf"this run on .* uploads to {url}"):  # when it is started again
        take_over(store_at(url), run, fresh=False)
