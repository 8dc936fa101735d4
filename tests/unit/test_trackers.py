"""Experiment trackers: each gets every record, one that fails ends no run, and a resumed run goes on where it was."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from report_cases import GOOD, check_report, message, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from samecurve.config.schema import Data
from samecurve.errors import ConfigurationError
from samecurve.specs.trackers import TRACKERS
from samecurve.training.trackers import Trackers

METER = SimpleNamespace(doubt=lambda record: "", scalars=lambda record: {"train/loss": record["loss"]})
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = os.environ.get("SAMECURVE_TRACKERS", "")


def opened(folder: Path, *names: str, start_step: int = 0, needed: bool = True) -> tuple[Trackers, list[str]]:
    lines: list[str] = []
    trackers = Trackers(names, METER, Data(path="x"), folder, lambda text: lines.append(text) if text else None, needed)
    trackers.open(start_step)
    return trackers, lines


def log(trackers: Trackers, *steps: int) -> None:
    for step in steps:
        trackers.log({"step": step, "loss": 10.0 - step, "step_seconds": 1.0, "data_wait_fraction": 0.0})


def events(folder: Path) -> dict[int, float]:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in found.Scalars("train/loss")}


def test_the_names_are_those_of_accelerate():
    assert set(TRACKERS) == {str(name) for name in LOGGER_TYPE_TO_CLASS}


def test_a_resumed_run_replaces_what_its_checkpoint_does_not_hold(tmp_path):
    first, _ = opened(tmp_path, "tensorboard")
    log(first, 1, 2, 3, 4)
    second, _ = opened(tmp_path, "tensorboard", start_step=2)
    log(second, 3)
    assert events(tmp_path) == {1: 9.0, 2: 8.0, 3: 7.0}


def broken(method: str, error: str = "no route") -> type:
    class Broken(SimpleNamespace):
        requires_logging_directory = False

        def __init__(self, run_name, **_):
            super().__init__(start=lambda: None, log=lambda *_, **__: None, finish=lambda: None)

            def fail(*_, **__):
                raise ConnectionError(error)

            setattr(self, method, fail)

    return Broken


@pytest.mark.parametrize(("method", "times"), [("start", 2), ("log", 2), ("finish", 1)])
def test_a_tracker_that_fails_is_said_at_once_and_at_the_end(method, times, tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "aim", broken(method))
    trackers, lines = opened(tmp_path, "aim", "tensorboard", needed=False)
    log(trackers, 1, 2)
    trackers.close()
    assert [line for line in lines if "aim failed: no route" in line] == lines and len(lines) == times
    assert events(tmp_path) == {1: 9.0, 2: 8.0}


@pytest.mark.parametrize(
    ("name", "variable", "url"),
    [
        ("mlflow", "MLFLOW_TRACKING_URI", "https://user:hunter22@host/"),
        ("mlflow", "MLFLOW_REGISTRY_URI", "postgresql://user:hunter22@host/db"),
        ("wandb", "WANDB_BASE_URL", "https://host/?api_key=hunter22"),
    ],
)
def test_the_url_of_a_tracker_has_no_credentials(name, variable, url, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, url)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, lambda *_, **__: pytest.fail("it would print the URL"))
    with pytest.raises(ConfigurationError, match=f"{name} failed: {variable}: the URL has a user") as refused:
        opened(tmp_path, name)
    assert "hunter22" not in str(refused.value)


def test_an_error_of_a_tracker_names_no_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_API_KEY", "hunter22hunter22")
    error = "https://user:hunter22@proxy:1/ refused hunter22hunter22"
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "comet_ml", broken("log", error))
    trackers, lines = opened(tmp_path, "comet_ml")
    log(trackers, 1)
    assert "comet_ml failed: https://***@proxy:1/ refused ***;" in lines[0]


def test_a_tracker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", broken("start"))
    with pytest.raises(ConfigurationError, match=r"wandb failed: no route; .*WANDB_MODE=offline.*on_failure=warn"):
        opened(tmp_path, "wandb", "tensorboard")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # hours of training are not lost to a tracker's server
    _, lines = opened(tmp_path, "wandb", "tensorboard")
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("wandb", "WANDB_PROJECT"),
        ("mlflow", "MLFLOW_EXPERIMENT_NAME"),
        ("comet_ml", "COMET_PROJECT_NAME"),
        ("swanlab", "SWANLAB_PROJ_NAME"),
        ("trackio", "TRACKIO_PROJECT"),
    ],
)
def test_the_project_of_the_environment(name, variable, tmp_path, monkeypatch):
    """Of Accelerate's own class, whose start is left out."""
    made = []
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS[name], "start", lambda tracker: made.append(tracker))
    run = SimpleNamespace(id="1", info=SimpleNamespace(run_id="1"))
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS[name], "tracker", run)
    folder = tmp_path / "lora"
    folder.mkdir()
    opened(folder, name)
    monkeypatch.setenv(variable, "mine")
    opened(folder, name)
    names = [tracker.experiment_name if name == "mlflow" else tracker.run_name for tracker in made]
    assert names == ["lora", "mine"]


def test_the_environment_of_wandb(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["wandb"], "start", lambda tracker: made.append(tracker))
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["wandb"], "tracker", SimpleNamespace(id="1"))
    monkeypatch.setenv("WANDB_RESUME", "must")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_NAME", "mine")  # wandb reads it where no name is passed
    opened(tmp_path, "wandb")
    assert made[0].init_kwargs == {"id": None}


def test_a_resumed_run_gives_each_tracker_its_own_run(tmp_path, monkeypatch):
    """Two trackers that have runs of their own, in a fresh session and in the next one."""
    given: list[str | None] = []

    class Remote(SimpleNamespace):
        requires_logging_directory = False

        def __init__(self, run_name, run_id=None, id=None, **_):  # noqa: A002
            given.append(run_id or id)
            made = f"run {len(given)}"
            super().__init__(start=lambda: None, tracker=SimpleNamespace(info=SimpleNamespace(run_id=made), id=made))

    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Remote)
    for start_step in (0, 2):
        _, lines = opened(tmp_path, "mlflow", "wandb", start_step=start_step)
        assert not lines
    assert given == [None, None, "run 1", "run 2"]


@pytest.mark.skipif(importlib.util.find_spec("aim") is not None, reason="aim is installed")
def test_a_missing_package_is_a_configuration_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {**GOOD, "r.yaml": GOOD["r.yaml"] + "logging:\n  trackers: [tensorboard, aim, tensorboard]\n"})
    text, code = message(tmp_path, ["r.yaml"], {})
    assert code == 2
    rows = [
        ("r.yaml:16", "logging.trackers", "aim", "pip install aim"),
        ("r.yaml:16", "logging.trackers", "tensorboard", "once"),
    ]
    check_report(text, rows)


OFFLINE = """
import json, sys
from pathlib import Path
from accelerate import PartialState
sys.path[:0] = [{here!r}]
from test_trackers import log, opened
folder, _ = Path({folder!r}), PartialState(cpu=True)  # the trackers' log lines ask for it
for start_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    trackers, lines = opened(folder, *{names!r}, start_step=start_step)
    log(trackers, *steps)
    trackers.close()
    assert not lines, lines
"""


def run_offline(folder: Path, name: str) -> None:
    script = OFFLINE.format(here=str(Path(__file__).parent), folder=str(folder), names=[name])
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    environ = {**os.environ, **settings, "PYTHONPATH": f"{ROOT}:{PACKAGES}"}
    subprocess.run([sys.executable, "-c", script], env=environ, cwd=folder, check=True, timeout=300)


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES, reason="scripts/test.sh --full installs wandb and mlflow and sets SAMECURVE_TRACKERS")
def test_mlflow_holds_all_steps_of_both_sessions_in_one_run(tmp_path):
    run_offline(tmp_path, "mlflow")
    [run_id] = json.loads((tmp_path / "trackers" / "runs.json").read_text()).values()
    reading = f"import mlflow, json; client = mlflow.MlflowClient('sqlite:///{tmp_path}/mlflow.db')\n"
    reading += f"found = client.get_metric_history({run_id!r}, 'train/loss')\n"
    reading += "print(json.dumps([[each.step, each.value] for each in found]))"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{PACKAGES}"}
    done = subprocess.run(
        [sys.executable, "-c", reading], env=environ, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    steps = dict(json.loads(done.stdout.splitlines()[-1]))
    assert steps == {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0}


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES, reason="scripts/test.sh --full installs wandb and mlflow and sets SAMECURVE_TRACKERS")
def test_wandb_offline_writes_both_sessions_under_one_run(tmp_path):
    run_offline(tmp_path, "wandb")
    [run_id] = json.loads((tmp_path / "trackers" / "runs.json").read_text()).values()
    written = [path for path in (tmp_path / "trackers").rglob("*.wandb") if path.stem == f"run-{run_id}"]
    assert len(written) == 2 and all(path.stat().st_size > 200 for path in written)
