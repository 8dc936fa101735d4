"""A build by the real ninja, whose compilers sleep: it ends with the process that asked for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from surrounded import wait_until

from samecurve.strategy import build_supervisor, preflight

ROOT = Path(__file__).resolve().parents[2]
NUM_COMPILERS = 2
# as torch writes it: relative outputs in the working directory. ninja gives each compiler a process group of its own.
SLOW = """
rule compile
  command = sh -c 'echo x >> $out.started; sleep 60; touch $out'
build a.o: compile
build b.o: compile
"""
ASKS = """
import os, subprocess, sys
from samecurve.strategy import preflight
preflight.prepare_environment()
if {supervised}:
    preflight.supervise_builds()
sys.exit(subprocess.run(["ninja", "-v", "-j", "2"], cwd=sys.argv[1], stdout=subprocess.PIPE).returncode)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "build.ninja").write_text(SLOW)
    yield tmp_path
    for process in builders(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ask(folder: Path, supervised: bool = True) -> subprocess.Popen:
    """As a rank does: torch runs ninja by its name."""
    code = ASKS.format(supervised=supervised)
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], env=os.environ | {"PYTHONPATH": str(ROOT)})


def builders(folder: Path) -> list[psutil.Process]:
    """ninja, its shells and what they run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
    return found


def compiles(folder: Path) -> bool:
    """ninja, two shells and what each of them waits for."""
    started = sum(len(path.read_text().split()) for path in folder.glob("*.started"))
    return started == NUM_COMPILERS and sum(each.name() == "sleep" for each in builders(folder)) == NUM_COMPILERS


def kill(process: psutil.Process | subprocess.Popen) -> None:
    process.kill()
    process.wait()


def test_without_a_supervisor_it_goes_on(folder):
    """What the supervisor is for. When this fails, ninja or torch have learned it."""
    rank = ask(folder, supervised=False)
    wait_until(lambda: compiles(folder), "compilers")
    kill(rank)
    time.sleep(1)
    assert compiles(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_asked(number, folder):
    rank = ask(folder)
    wait_until(lambda: compiles(folder), "compilers")
    rank.send_signal(number)
    rank.wait()
    wait_until(lambda: not builders(folder), "no builder")
    assert not list(folder.glob("*.o"))


def test_nothing_is_built_for_a_killed_process_that_nobody_has_waited_for(folder, monkeypatch):
    """Its own child that starts late has the system's first process as its parent, which never ends."""
    killed = subprocess.Popen(["sleep", "60"])
    killed.kill()
    wait_until(lambda: psutil.Process(killed.pid).status() == psutil.STATUS_ZOMBIE, "a zombie")
    monkeypatch.setenv(build_supervisor.RANK, str(killed.pid))
    command = [sys.executable, build_supervisor.__file__, "-v"]
    assert subprocess.run(command, cwd=folder).returncode == 1
    killed.wait()
    assert not list(folder.glob("*.started"))


@pytest.mark.parametrize(("command", "code"), [("touch $out", 0), ("false", 1)])
def test_it_is_ninja_to_who_asks(command, code, folder, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in ("SAMECURVE_PYTHON", build_supervisor.RANK):
        monkeypatch.setenv(name, "")
    preflight.prepare_environment()
    plain = subprocess.run(["ninja", "--version"], capture_output=True, text=True, check=True)
    preflight.supervise_builds()
    assert subprocess.run(["ninja", "--version"], capture_output=True, text=True).stdout == plain.stdout
    (folder / "build.ninja").write_text(f"rule run\n  command = {command}\nbuild a.o: run\n")
    done = subprocess.run(["ninja", "-v"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == code and command.partition(" ")[0] in done.stdout


def test_it_does_not_pass_for_an_installed_ninja(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(build_supervisor.SUPERVISED))
    done = subprocess.run(
        [sys.executable, build_supervisor.__file__, "-v"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 127 and "ninja: not found" in done.stderr


def test_the_script_may_be_run():
    assert os.access(build_supervisor.SUPERVISED / "ninja", os.X_OK)
