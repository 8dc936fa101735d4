"""ssh to the hosts of a job, without a password."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from samecurve.distributed import network
from samecurve.errors import ConfigurationError, SamecurveError, TopologyError
from samecurve.specs import environment

ROOT = environment.ROOT if environment.IN_CLONE else Path.cwd()  # where the processes of other hosts start
# what DeepSpeed's launcher gives to the ssh under its pdsh, so that one setting serves both
SSH_ARGUMENTS = "PDSH_SSH_ARGS_APPEND"
# the launchers pass on such variables
FORWARDED = ("NCCL_", "GLOO_", "CUDA_", "HF_", "OMP_", "SAMECURVE_", "PYTHON", "TORCH_")
REACH_SECONDS = 30.0


class HostProblem(NamedTuple):
    """A host that cannot be used: what it said, the problem, the fix, and the class of the error."""

    seen: str
    problem: str
    fix: str
    kind: type[SamecurveError]


def command(host: str, text: str) -> list[str]:
    """Return the words that run `text` in the shell of a host."""
    extra = shlex.split(os.environ.get(SSH_ARGUMENTS, ""))
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *extra, "--", host, text]


def run(
    host: str, text: str, seconds: float, variables: Mapping[str, object] | None = None
) -> subprocess.CompletedProcess:
    """Run a command in the shell of a host and capture its output.

    Args:
        text: the command, for the host's shell.
        seconds: time limit.
        variables: environment variables of the command; hidden from the hosts' other users.

    Raises:
        subprocess.TimeoutExpired: the command took longer than `seconds`.
    """
    exports = "".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in (variables or {}).items())
    if exports:
        # not in the command line, which every user of either host can read; not by `. /dev/stdin`, a socket under sshd
        text = "sh -c " + shlex.quote('eval "$(cat)"; ' + text)
    return subprocess.run(command(host, text), input=exports, capture_output=True, text=True, timeout=seconds)


def forwarded(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that processes on other hosts get, too."""
    return {name: value for name, value in environ.items() if name.startswith(FORWARDED)}


def trouble(host: str) -> HostProblem | None:
    """Return why a host cannot be used: no login without a password, or no such clone or Python there; else None."""
    python, train = shlex.quote(sys.executable), shlex.quote(str(ROOT / "train.py" if environment.IN_CLONE else ROOT))
    try:
        # these commands end with 0 whatever they find, so that another code is ssh's own
        done = run(host, f"test -x {python} || echo python; test -e {train} || echo clone", REACH_SECONDS)
    except subprocess.TimeoutExpired:
        return HostProblem("", f"no answer in {REACH_SECONDS:.0f} s", f"try ssh {host} true", TopologyError)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = f"ssh-copy-id {host}" if "Permission denied" in said else f"try ssh -v {host} true"
        return HostProblem(said, "no login without a password", fix, TopologyError)
    lacking = done.stdout.split()
    if lacking:
        missing = {"python": sys.executable, "clone": str(ROOT)}
        problem = f"not there: {', '.join(missing[tool] for tool in lacking)}"
        fix = "put clone and .venv on a file system that all hosts mount, or at the same path on each"
        return HostProblem("logs in", problem, fix, ConfigurationError)
    return None


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback or host in network.interfaces()
    except ValueError:
        return False
