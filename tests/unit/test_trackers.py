"""Experiment trackers: each gets every record, one that fails ends no run, and a resumed run goes on where it was."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType, ProjectConfiguration
from report_cases import GOOD, check_report, message, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from samecurve.accelerator.accelerator import Accelerator
from samecurve.accelerator.trackers import Trackers
from samecurve.config.schema import Logging
from samecurve.errors import ConfigurationError
from samecurve.specs.trackers import TRACKERS
from samecurve.training.startup import start_trackers

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = os.environ.get("SAMECURVE_TRACKERS", "")


def script(folder: Path, *log_with: str | GeneralTracker) -> tuple[Trackers, list[str]]:
    """The Accelerator of a script, and what it reports."""
    config, lines = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder)), []
    accelerator = Trackers(cpu=True, log_with=[*log_with], project_config=config)
    accelerator.report = lines.append
    return accelerator, lines


def opened(folder: Path, *names: str, start_step: int = 0, needed: bool = True) -> tuple[Trackers, list[str]]:
    """The Accelerator of a run of train.py, and what it reports."""
    accelerator, lines = script(folder, *names)
    logging = Logging(trackers=names, on_failure="stop" if needed else "warn")
    recipe = SimpleNamespace(output_dir=str(folder), logging=logging)
    start_trackers(accelerator, recipe, start_step, lines.append)
    return accelerator, lines


def log(accelerator: Trackers, *steps: int) -> None:
    for step in steps:
        accelerator.log({"train/loss": 10.0 - step}, step=step)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """All trackers count as installed: those without their package are replaced by the tests."""
    monkeypatch.setattr("accelerate.tracking._available_trackers", [*LoggerType])
    # of the same length for all files: those of one second are read in the order of their names
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


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


def broken(name: str, method: str, error: str = "no route") -> type:
    class Broken(SimpleNamespace):
        requires_logging_directory = False

        def __init__(self, run_name, **_):
            super().__init__(name=name, start=lambda: None, log=lambda *_, **__: None, finish=lambda: None)

            def fail(*_, **__):
                raise ConnectionError(error)

            setattr(self, method, fail)

    return Broken


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_reported_once(method, tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "aim", broken("aim", method))
    accelerator, lines = opened(tmp_path, "aim", "tensorboard", needed=False)
    log(accelerator, 1, 2)
    accelerator.end_training()
    assert lines == ["tracker aim failed: no route; the run goes on without it"]
    assert accelerator.tracker_failures.keys() == {"aim"}
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
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS[name], "start", lambda _: pytest.fail("it would print the URL"))
    with pytest.raises(ConfigurationError, match=f"{name} failed: {variable}: the URL has a user") as refused:
        opened(tmp_path, name)
    assert "hunter22" not in str(refused.value)


def test_an_error_of_a_tracker_names_no_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_API_KEY", "hunter22hunter22")
    error = "https://user:hunter22@proxy:1/ refused hunter22hunter22"
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "comet_ml", broken("comet_ml", "log", error))
    trackers, lines = opened(tmp_path, "comet_ml")
    log(trackers, 1)
    assert "comet_ml failed: https://***@proxy:1/ refused ***;" in lines[0]


def test_a_tracker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", broken("wandb", "start"))
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
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    opened(tmp_path, "wandb")
    assert made[1].init_kwargs == {}


def test_the_run_name_of_mlflow(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["mlflow"], "start", lambda tracker: made.append(tracker))
    monkeypatch.setenv("MLFLOW_RUN_NAME", "mine")
    script(tmp_path, "mlflow")[0].init_trackers("project")
    assert made[0].run_name == "mine"


@pytest.fixture
def remote(monkeypatch) -> list[str | None]:
    """The runs that mlflow and wandb are asked to continue."""
    given: list[str | None] = []

    class Remote(SimpleNamespace):
        requires_logging_directory = False

        def __init__(self, run_name, run_id=None, id=None, **_):  # noqa: A002
            given.append(run_id or id)
            made = f"run {len(given)}"
            run = SimpleNamespace(info=SimpleNamespace(run_id=made), id=made)
            super().__init__(name=run_name, start=lambda: None, log=lambda *_, **__: None, tracker=run)

    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Remote)
    return given


def test_a_resumed_run_gives_each_tracker_its_own_run(tmp_path, remote):
    for start_step in (0, 2):
        _, lines = opened(tmp_path, "mlflow", "wandb", start_step=start_step)
        assert not lines
    assert remote == [None, None, "run 1", "run 2"]


@pytest.mark.parametrize("loads", ["before", "after", None])
def test_a_script_continues_its_run_after_load_state(loads, tmp_path, remote, monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "load_state", lambda *_, **__: None)
    first, _ = script(tmp_path, "tensorboard", "wandb")
    first.init_trackers("tensorboard")
    assert remote == [None]  # at once, as there is nothing to continue
    log(first, 1, 2, 3, 4)
    second, lines = script(tmp_path, "tensorboard", "wandb")
    if loads == "before":
        second.load_state("checkpoint")
    second.init_trackers("tensorboard")
    if loads == "after":
        second.load_state("checkpoint")
    log(second, 3)
    assert remote == [None, "run 1" if loads else None] and not lines
    assert events(tmp_path).keys() == ({1, 2, 3} if loads else {1, 2, 3, 4})


def test_load_state_of_the_accelerator_is_noticed():
    assert Accelerator.load_state is Trackers.load_state


class Own(GeneralTracker):
    name = "own"
    requires_logging_directory = False

    def __init__(self, refuses_config: bool = False):
        super().__init__()
        self.calls, self.refuses_config = [], refuses_config

    @property
    def tracker(self):
        return self.calls

    def store_init_configuration(self, values):
        if self.refuses_config:
            raise ValueError("other values than before")

    def log(self, values, step=None, **options):
        self.calls.append((values, step, options))


def test_a_tracker_of_the_user_gets_what_accelerate_gives_it(tmp_path):
    own = Own()
    accelerator, lines = script(tmp_path, own, "tensorboard")
    accelerator.init_trackers("project", config={"rate": 0.1})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"own": {"kind": "train"}})
    assert accelerator.get_tracker("own") is own and accelerator.get_tracker("own", unwrap=True) is own.calls
    assert own.calls == [({"loss": 1.0}, 3, {"kind": "train"})] and not lines
    assert [tracker.name for tracker in accelerator.trackers] == ["own", "tensorboard"]
    with pytest.raises(ValueError, match="not an available tracker"):
        accelerator.get_tracker("wandb")


def test_a_refused_configuration_leaves_the_metrics(tmp_path):
    accelerator, lines = script(tmp_path, own := Own(refuses_config=True))
    accelerator.init_trackers("project", config={"rate": 0.1})
    log(accelerator, 1)
    assert len(own.calls) == 1 and "goes on without its configuration" in lines[0]


def test_a_failed_tracker_can_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", broken("wandb", "start"))
    accelerator, _ = script(tmp_path, "wandb", "tensorboard")
    accelerator.init_trackers("project")
    accelerator.get_tracker("wandb").log({"loss": 1.0})


def test_a_missing_package_is_reported_to_a_script(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    accelerator, lines = script(tmp_path, "wandb", "tensorboard")
    accelerator.init_trackers("project")
    assert lines == ["tracker wandb failed: its package is not installed; the run goes on without it"]


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
sys.path[:0] = [{here!r}]
from test_trackers import log, opened
folder = Path({folder!r})
for start_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    accelerator, lines = opened(folder, *{names!r}, start_step=start_step)
    log(accelerator, *steps)
    accelerator.end_training()
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
