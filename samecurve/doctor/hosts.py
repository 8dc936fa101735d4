"""The hosts of a hostfile: can they be reached by ssh, and what does the doctor say on them?"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from samecurve.doctor.findings import Finding, failed
from samecurve.errors import ConfigurationError, TopologyError

ROOT = Path(__file__).resolve().parents[2]
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# what DeepSpeed's launcher gives to the ssh under its pdsh, so that one setting serves both
SSH_ARGUMENTS = "PDSH_SSH_ARGS_APPEND"
FORWARDED = ("NCCL_", "GLOO_", "CUDA_", "HF_", "OMP_", "SAMECURVE_", "PYTHON")  # the launchers pass on such variables
_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>\d+))?")
_MORE_SECONDS = 240  # beside the limits of the stages: imports from a cold network disk


@dataclass(frozen=True)
class Host:
    """A line of a hostfile: the name and the number of processes."""

    name: str
    slots: int


def read_hostfile(path: str) -> list[Host]:
    """Read a hostfile as the deepspeed launcher does: a name and slots=N per line, # for comments.

    Raises:
        ConfigurationError: it cannot be read, is empty, or has a line of another form; all lines are reported.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--hostfile {path}: {error.strerror}") from error
    hosts, problems = [], []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        found = _LINE.fullmatch(content)
        if found:
            hosts.append(Host(found["host"], int(found["slots"] or 1)))
        elif content:
            problems.append(f"{path}:{number}: found {content!r}, expected NAME slots=N")
    names = [each.name for each in hosts]
    problems += [f"{path}: {name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    if problems or not hosts:
        raise ConfigurationError("\n".join(problems) or f"{path}: no host; write a line NAME slots=N for each")
    return hosts


def examine(
    hosts: Sequence[Host], arguments: Sequence[str], master: str | None, port: int, seconds: float
) -> list[Finding]:
    """Start the doctor on every host that ssh reaches, one process each, and return what they found together.

    Args:
        arguments: of `python -m samecurve doctor` on each host.
        master: the address of the first host for the others; None for its name.
        seconds: limit of each of its stages.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        reached = list(pool.map(_reach, hosts))
        good = [host for host, finding in zip(hosts, reached, strict=True) if not finding.exit_code]
        if not good:
            return reached
        address = master or good[0].name
        starts = [(host, rank, len(good), address, port, arguments, seconds) for rank, host in enumerate(good)]
        outputs = list(pool.map(lambda each: _start(*each), starts))
    return [*reached, *(finding for each in outputs for finding in each)]


def _ssh(host: str, command: str, seconds: float) -> subprocess.CompletedProcess:
    extra = shlex.split(os.environ.get(SSH_ARGUMENTS, ""))
    return subprocess.run(
        [*SSH, *extra, host, command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
    )


def _reach(host: Host) -> Finding:
    """Log in without a password, and look whether this clone and this Python are there, too."""
    python, train = shlex.quote(sys.executable), shlex.quote(str(ROOT / "train.py"))
    try:
        done = _ssh(host.name, f"test -x {python} || echo python; test -f {train} || echo clone", 30)
    except subprocess.TimeoutExpired:
        return failed("ssh", host.name, "no answer in 30 s", f"try ssh {host.name} true", TopologyError, host.name)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = f"ssh-copy-id {host.name}" if "Permission denied" in said else f"try ssh -v {host.name} true"
        return failed("ssh", said, "no login without a password", fix, TopologyError, host.name)
    lacking = done.stdout.split()
    if lacking:
        missing = {"python": sys.executable, "clone": str(ROOT)}
        problem = f"not there: {', '.join(missing[each] for each in lacking)}"
        fix = "put clone and .venv on a file system that all hosts mount, or at the same path on each"
        return failed("ssh", "logs in", problem, fix, ConfigurationError, host.name)
    return Finding("ssh", "logs in without a password", host=host.name)


def _start(
    host: Host, rank: int, size: int, address: str, port: int, arguments: Sequence[str], seconds: float
) -> list[Finding]:
    variables = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }  # fmt: skip
    passed = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    settings = [f"{name}={value}" for name, value in {**passed, **variables}.items()]
    command = ["env", *settings, sys.executable, "-m", "samecurve", "doctor", *arguments, "--json", "-"]
    limit = 8 * seconds + _MORE_SECONDS
    try:
        done = _ssh(host.name, f"cd {shlex.quote(str(ROOT))} && {shlex.join(command)}", limit)
        return [Finding(**_fields(each)) for each in json.loads(done.stdout.splitlines()[-1])["findings"]]
    except subprocess.TimeoutExpired:
        return [failed("doctor", f"rank {rank}", f"it did not end in {limit:.0f} s", "", TopologyError, host.name)]
    except (ValueError, IndexError):
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        return [failed("doctor", said, "it failed there", f"run it on {host.name}", ConfigurationError, host.name)]


def _fields(finding: dict) -> dict:
    return {name: value for name, value in finding.items() if name != "level"}
