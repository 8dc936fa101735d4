"""Two machines out of one: a network namespace each, a cable between them, an sshd in each.

They share the file system, as cluster nodes do, and nothing of the network: the launcher's ssh and the processes' gloo
go over the cable. Each resolves its own name to 127.0.1.1, as Debian sets it up. Needs root on Linux and the packages
iproute2, openssh-server, pdsh.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")
ROOT = Path(__file__).resolve().parents[2]
INTERFACES = ("cable0", "cable1")  # no one GLOO_SOCKET_IFNAME fits both hosts
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def missing() -> str | None:
    """Why two hosts cannot be made here; None when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    packages = {"iproute2": shutil.which("ip"), "openssh-server": _SSHD, "pdsh": shutil.which("pdsh")}
    absent = [package for package, found in packages.items() if not found]
    if absent:
        return f"apt-get install {' '.join(absent)}"
    probe = f"samecurve-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    _run("ip", "netns", "delete", probe)
    return None


def skip_without_quotes(launcher: str) -> None:
    if launcher == "deepspeed" and " " in str(ROOT):  # samecurve/launch/start.py refuses it
        pytest.skip(f"deepspeed's launcher reaches no other host from a path with a space: {ROOT}")


class TwoHosts:
    """`run` starts a command on the first host; its ssh reaches both by address without a password."""

    def __init__(self, folder: Path, namespaces: list[str], environment: dict[str, str]):
        self.folder, self.namespaces, self.environment = folder, namespaces, environment

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    def received_bytes(self) -> int:
        """What came over the cable to the first host since it was plugged in."""
        shown = _run(*f"ip -n {self.namespaces[0]} -json -stats link show {INTERFACES[0]}".split())
        return json.loads(shown)[0]["stats64"]["rx"]["bytes"]

    def plug(self, state: str) -> None:
        """Plug the cable of the second host in ("up") or pull it out ("down"): nobody is told."""
        _run("ip", "-n", self.namespaces[1], "link", "set", INTERFACES[1], state)

    def run(self, command: list[str], working_directory: Path, timeout_seconds: float) -> subprocess.CompletedProcess:
        """Output and errors are one text. A command that runs out of time is killed, here and on the other host."""
        inside = ["ip", "netns", "exec", self.namespaces[0], *command]
        return subprocess.run(
            inside,
            cwd=working_directory,
            env=self.environment,
            timeout=timeout_seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def two_hosts(folder: Path, exports: dict[str, str]) -> Iterator[TwoHosts]:
    """`folder`: an empty one, for keys and configuration. `exports`: environment that DeepSpeed passes to both hosts.

    Whatever happens inside, namespaces and every process in them are gone afterwards.
    """
    namespaces = [f"samecurve{index}-{os.getpid()}" for index in range(2)]
    _write_ssh_files(folder)
    (folder / "hostfile").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    (folder / "deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in exports.items()))
    environment = {
        **os.environ,
        "PDSH_SSH_ARGS_APPEND": f"-F {folder}/ssh_config",
        "DS_ENV_FILE": str(folder / "deepspeed_env"),
    }
    with ExitStack() as stack:
        for namespace in namespaces:
            _run("ip", "netns", "add", namespace)
            stack.callback(_remove, namespace)
            stack.enter_context(_own_name_is_loopback(namespace))
        _connect(namespaces)
        for namespace, address in zip(namespaces, ADDRESSES, strict=True):
            _start_sshd(namespace, address, folder)
        yield TwoHosts(folder, namespaces, environment)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _connect(namespaces: list[str]) -> None:
    first, second = namespaces
    near, far = INTERFACES
    _run(*f"ip link add {near} netns {first} type veth peer name {far} netns {second}".split())
    for namespace, address, end in zip(namespaces, ADDRESSES, INTERFACES, strict=True):
        for settings in (f"address add {address}/24 dev {end}", f"link set {end} up", "link set lo up"):
            _run("ip", "-n", namespace, *settings.split())


@contextmanager
def _own_name_is_loopback(namespace: str) -> Iterator[None]:
    """Give the namespace an /etc/hosts of its own, which `ip netns exec` mounts over the machine's."""
    folder = Path("/etc/netns", namespace)
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    try:
        yield
    finally:
        shutil.rmtree(folder)


def _write_ssh_files(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    server = {
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "StrictModes": "no",  # the temporary folder's parents belong to others
        "UsePAM": "no",
        "PidFile": "none",
    }
    client = {
        "IdentityFile": folder / "user_key",
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    for name, settings in (("sshd_config", server), ("ssh_config", client)):
        (folder / name).write_text("".join(f"{key} {value}\n" for key, value in settings.items()))


def _start_sshd(namespace: str, address: str, folder: Path) -> None:
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's empty folder for its unprivileged part
    log = folder / f"sshd-{address}.log"
    arguments = ["-f", str(folder / "sshd_config"), "-o", f"ListenAddress={address}", "-E", str(log)]
    _run("ip", "netns", "exec", namespace, str(_SSHD), *arguments)  # it returns when it listens


def kill_all(namespace: str) -> None:
    """Kill what runs inside. Only processes of this namespace are touched."""
    for _ in range(50):
        process_ids = _run("ip", "netns", "pids", namespace).split()
        if not process_ids:
            break
        for process_id in process_ids:
            with suppress(ProcessLookupError):
                os.kill(int(process_id), signal.SIGKILL)
        time.sleep(0.1)


def _remove(namespace: str) -> None:
    kill_all(namespace)
    _run("ip", "netns", "delete", namespace)
