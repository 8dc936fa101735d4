"""Ranks that train.py starts by itself, and processes that stand or fall together: exit codes, signals, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samecurve.errors import ConfigurationError, TopologyError
from samecurve.launch import scripts, ssh, together
from samecurve.launch import start as launch_start
from samecurve.launch.hosts import HostSlots
from samecurve.launch.start import _over_ssh
from samecurve.launch.target import Target
from samecurve.strategy.launchers import OWN_PROCESSES
from samecurve.strategy.resolve import resolve_plan

ROOT = Path(__file__).resolve().parents[2]
# What train.py does: it starts itself again. A rank says who it is, and does what its argument says.
SCRIPT = """
import os, signal, sys, time
from samecurve.launch import ranks
if "SAMECURVE_PROCESSES" not in os.environ:
    ranks.start_and_exit(3)
rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
world = [os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]

def say(*words):  # in one call: the ranks share a pipe
    os.write(1, f"{' '.join(words)}\\n".encode())

say("rank", rank, *world, port)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
signal.signal(signal.SIGINT, lambda *_: told.append("SIGINT"))
code = dict(word.split(":") for word in sys.argv[1:]).get(rank)
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if code not in (None, "late"):
    sys.exit(int(code))
say("waits")
deadline = time.monotonic() + 30
while not told and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(1 if code == "late" else 0)
say("told", *told)
sys.exit(75)
"""


@pytest.fixture
def script(tmp_path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def start(words: list[str]) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment, **options)


def test_ranks_know_their_world(script):
    done = start([*script, "0:0", "1:0", "2:0"])
    lines = sorted(line.split() for line in done.communicate(timeout=30)[0].splitlines())
    assert done.returncode == 0
    port = lines[0][-1]
    assert lines == [["rank", str(rank), str(rank), "3", "3", port] for rank in range(3)]


@pytest.mark.parametrize(("fate", "code"), [("1:7", 7), ("2:kill", 128 + signal.SIGKILL)])
def test_the_first_failure_ends_all_and_is_the_exit_code(fate, code, script):
    """The others would exit with 75."""
    done = start([*script, fate])
    output = done.communicate(timeout=30)[0]
    assert done.returncode == code
    assert output.count("told SIGTERM") == output.count("waits")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_once(number, script):
    """They are not in the terminal's group, and one that saves longer than others is not told again."""
    done = start([*script, "1:late"])
    assert done.stdout
    for _ in range(6):
        done.stdout.readline()
    done.send_signal(number)
    output = done.communicate(timeout=30)[0]
    assert (done.returncode, output.splitlines()) == (75, [f"told {number.name}"] * 3)


def order(words: list[str], environment: dict[str, str]) -> str:
    """The first line of standard input that starts a host's part of a job."""
    return json.dumps({"words": words, "environment": environment}) + "\n"


def far_side(script: list[str]) -> subprocess.Popen:
    """The process that ssh starts on another host, here with one rank of the script behind it."""
    far = start([sys.executable, "-m", "samecurve.launch.start"])
    assert far.stdin and far.stdout
    far.stdin.write(order(script, {OWN_PROCESSES: "1", "RANK": "0", "LOCAL_RANK": "0", **WORLD}))
    far.stdin.flush()
    assert far.stdout.readline() == "rank 0 0 1 1 5\n" and far.stdout.readline() == "waits\n"
    return far


WORLD = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "5"}


def test_a_lost_connection_stops_the_far_side(script):
    far = far_side(script)
    assert far.stdin
    far.stdin.close()
    far.stdin = None
    assert far.communicate(timeout=30)[0] == "told SIGTERM\n" and far.returncode == 75


def test_a_signal_goes_through_the_connection(script):
    far = far_side(script)
    assert far.stdin
    far.stdin.write("SIGINT\n")
    far.stdin.flush()
    assert far.wait(30) == 75
    assert far.communicate()[0] == "told SIGINT\n"


@pytest.mark.parametrize(("words", "code"), [(["sh", "-c", "echo $SAMECURVE_X > $SAMECURVE_Y"], 0), (["no-such"], 127)])
def test_words_and_variables_go_over_ssh(words, code, tmp_path, monkeypatch, capfd):
    (tmp_path / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec env -u SAMECURVE_X sh -c "$last"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAMECURVE_X", "a secret")
    monkeypatch.setenv("SAMECURVE_Y", str(tmp_path / "said"))
    assert _over_ssh("far", words, dict(os.environ)).process.wait(30) == code
    if code:
        assert "no-such: not found on" in capfd.readouterr().err
    else:
        assert (tmp_path / "said").read_text() == "a secret\n"


@pytest.mark.parametrize(("given", "seconds"), [(None, 270), ("600", 600)])
def test_torchrun_has_time_to_save(given, seconds, tmp_path, monkeypatch):
    """On every host of --start, which ends a host by force later than torchrun its processes; and under a script."""
    variable, sent = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", []
    monkeypatch.setenv(variable, given) if given else monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(launch_start, "_check", lambda *_: None)
    monkeypatch.setattr(
        launch_start, "_over_ssh", lambda _, words, environment: sent.append(ssh.forwarded(environment))
    )
    monkeypatch.setattr(together, "wait", lambda starting, grace_seconds: len([*starting]) and grace_seconds)
    target = Target("a.yaml", "b.yaml", (), (HostSlots("a.invalid", 1), HostSlots("b.invalid", 1)), named=True)
    assert launch_start.run("torchrun", target) == seconds + 30
    assert [variables[variable] for variables in sent] == [str(seconds)] * 2
    (tmp_path / "accelerate").write_text(f"#!/bin/sh\necho ${variable}\n")
    (tmp_path / "accelerate").chmod(0o755)
    target = Target("a.yaml", str(ROOT / "configs/fsdp.yaml"), (), (HostSlots("localhost", 1),))
    script = scripts.files("accelerate", target)["accelerate.sh"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.check_output(["bash", "-c", script], env=environment, text=True) == f"{seconds}\n"


def test_torchruns_limit_is_a_number(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5m")
    with pytest.raises(ConfigurationError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT: found '5m', expected a whole number"):
        launch_start.run("torchrun", Target("a.yaml", "b.yaml", (), (HostSlots("localhost", 1),)))


# the plan of the process that starts ranks, and of a rank

RECIPE = ["recipes/quickstart.yaml", "--strategy", "configs/zero2.yaml"]


@pytest.fixture
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_plan_is_that_of_the_ranks(in_the_repository):
    parent = resolve_plan([*RECIPE, "--num_processes", "4"], {})
    rank = resolve_plan([*RECIPE, "--num_processes", "4"], {"WORLD_SIZE": "4", "RANK": "3", OWN_PROCESSES: "4"})
    assert (parent.processes_to_start, rank.processes_to_start) == (4, 0)
    assert parent.strategy == rank.strategy and rank.strategy.launcher == "train.py"
    assert rank.strategy.world_size == 4
    assert resolve_plan(["recipes/quickstart.yaml"], {}).processes_to_start == 0


@pytest.mark.parametrize(
    ("arguments", "environ", "kind", "message"),
    [
        (["--num_processes", "0"], {}, ConfigurationError, "--num_processes: found 0, expected 1 or more"),
        (["--num_processes", "3"], {}, TopologyError, "--num_processes: found 3, but without a strategy each process"),
        (
            ["--num_processes", "2"],
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1"},
            ConfigurationError,
            "found 2, but torchrun has started this process; omit --num_processes here",
        ),
    ],
)
def test_numbers_that_cannot_be(arguments, environ, kind, message, in_the_repository):
    with pytest.raises(kind, match=message):
        resolve_plan([RECIPE[0], *arguments], environ)


def test_plain_python_is_told_of_it(in_the_repository):
    with pytest.raises(TopologyError, match="or add --num_processes 2"):
        resolve_plan(RECIPE, {})
