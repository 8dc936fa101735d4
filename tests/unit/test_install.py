"""The wheel by itself, outside of the clone, and without DeepSpeed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("samecurve", "recipes", "configs", "ds_configs", "docs", "train.py", "constraints.txt"),
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
)
SMALL = (
    *("data.path=data", "data.cache_dir=cache", "data.validation_fraction=0.25", "tokenizer.vocabulary_size=300"),
    *("model.config.hidden_size=16", "model.config.intermediate_size=32", "model.config.num_hidden_layers=2"),
    *("batch.sequence_length=16", "steps=2", "export.verify=off"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed wheel, and a sitecustomize that hides DeepSpeed."""
    folder = tmp_path_factory.mktemp("install")
    source, target = folder / "source", folder / "site"
    for name in SOURCES:
        path, copy = ROOT / name, source / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, "."], cwd=source, check=True
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-compile", "--target", target, wheel], check=True)
    (target / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    return target


def run(site: Path, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run a command in an empty folder with 16 texts, where only the wheel has samecurve."""
    (folder / "data").mkdir(exist_ok=True)
    for number in range(16):
        (folder / "data" / f"{number}.txt").write_text(" ".join(str(number * k) for k in range(60)))
    around = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, timeout=240)


def test_the_installed_package_trains_anywhere(site, tmp_path):
    help_text = run(site, tmp_path, str(site / "bin" / "samecurve"), "--help")
    assert help_text.returncode == 0 and help_text.stdout.startswith("usage: samecurve [-h] COMMAND")
    done = run(site, tmp_path, sys.executable, "-m", "samecurve.train", "recipes/quickstart.yaml", *SMALL)
    assert done.returncode == 0, done.stderr
    shipped = site / "samecurve" / "shipped"
    note = f"recipes/quickstart.yaml: not in the working directory; the installed {shipped}/recipes/quickstart.yaml"
    assert note in done.stdout and (tmp_path / "runs/quickstart/model/model.safetensors").is_file()
    summary = run(site, tmp_path, sys.executable, "-m", "samecurve", "summary", "runs/quickstart")
    assert f"--config_file {shipped}/configs/" in summary.stdout and " -m samecurve.train recipes/" in summary.stdout


@pytest.mark.parametrize(
    ("strategy", "code"), [("zero1", 2), pytest.param("ddp", 0, marks=pytest.mark.full), ("pipeline", 2)]
)
def test_only_some_strategies_need_deepspeed(strategy, code, site, tmp_path):
    more = ("--strategy", strategy, "--num_processes", "2")
    done = run(site, tmp_path, sys.executable, "-m", "samecurve.train", "recipes/quickstart.yaml", *SMALL, *more)
    assert done.returncode == code, done.stderr
    if code:
        assert f"strategy {strategy}: needs DeepSpeed, which is not installed: pip install 'samecurve[deepspeed]'" in (
            done.stderr
        )
    else:
        assert "engine      DistributedDataParallel" in done.stdout


@pytest.mark.full
def test_accelerate_launches_the_installed_module(site, tmp_path):
    path = run(site, tmp_path, sys.executable, "-m", "samecurve", "path", "configs/fsdp.yaml")
    config = path.stdout.strip()
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2")
    done = run(site, tmp_path, *accelerate, "-m", "samecurve.train", "recipes/quickstart.yaml", *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"strategy    fsdp ({config})" in done.stdout


@pytest.mark.full
def test_the_installed_package_compares_strategies(site, tmp_path):
    command = (str(site / "bin" / "samecurve"), "compare", "recipes/quickstart.yaml", *SMALL, "--steps", "2")
    done = run(site, tmp_path, *command, "--strategies", "single,ddp", "--num_processes", "2")
    assert done.returncode == 0, done.stderr


def test_the_requirements_of_wheel_and_clone_agree():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = (ROOT / "requirements.txt").read_text().split()
    assert sorted(project["dependencies"] + extras["deepspeed"]) == sorted(listed)
    text = "\n".join(file.read_text() for file in ROOT.glob("requirements-*.txt"))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", text, re.MULTILINE))
    bounds = [requirement.split(">=") for name in extras if name != "deepspeed" for requirement in extras[name]]
    assert bounds and all(pinned[name].startswith(lowest) for name, lowest in bounds)


def test_the_dockerfile_is_pinned_and_copies_what_exists():
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    assert [value for word, value in steps if word == "FROM"] == ["nvidia/cuda:13.0.2-devel-ubuntu24.04"]
    copied = [name for word, value in steps if word == "COPY" for name in value.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(sent) == sorted(copied)
    assert {*SOURCES} <= {*copied}  # what setup.py puts into the wheel, too
    installs = [value for word, value in steps if word == "RUN" and "pip install" in value]
    assert len(installs) == 2 and all("-c /src/constraints.txt" in value for value in installs)
    assert [value for word, value in steps if word == "USER"] == ["ubuntu"] and steps[-1][0] == "CMD"
    assert not re.search(r"token|secret|password|https?://", text, re.IGNORECASE)
