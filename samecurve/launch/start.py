"""Starts a target on its hosts and waits: `python -m samecurve launch --start`; and a host's part of it behind ssh."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samecurve.errors import ConfigurationError, SamecurveError, TopologyError
from samecurve.launch import scripts, ssh, together
from samecurve.launch.target import Target
from samecurve.launch.together import StartedProcess
from samecurve.specs.environment import INSTALL
from samecurve.storage import terminal
from samecurve.storage.atomic import storage_errors

_APPLY = ["kubectl", "apply", "-f", "-"]
SUBMIT = {"slurm": ["sbatch"], "kubernetes": _APPLY, "trainjob": _APPLY}
# asked on the first host: exit code 1 where something listens at the port
_PROBE = "import socket, sys; s = socket.socket(); s.settimeout(2); sys.exit(not s.connect_ex((sys.argv[1], {port})))"


def run(launcher: str, target: Target) -> int:
    """Start the target, wait for its end, and return the exit code: 0, or the launcher's that failed first.

    Raises:
        ConfigurationError, TopologyError: a program is missing, a host cannot be used, or the port is in use; all such
            problems are reported together.
    """
    if launcher in SUBMIT:
        words, text = SUBMIT[launcher], scripts.text(launcher, target)
        if not shutil.which(words[0]):
            raise ConfigurationError(f"--start: {words[0]} is not on PATH; run this where it is, or leave out --start")
        return subprocess.run(words, input=text, text=True).returncode
    starts = scripts.starts(launcher, target)
    away = [host for host, _ in starts if host and not ssh.is_here(host)]
    _check(launcher, target, away)
    environment = {scripts.TORCHRUN_LIMIT: str(scripts.TORCHRUN_SECONDS), **os.environ}
    environment["PATH"] = own_path(environment)
    if launcher == "deepspeed":  # it reads its hosts, and the variables that it passes on, from files
        folder = Path(target.folder)
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in scripts.needed(target).items():
                (folder / name).write_text(text, encoding="utf-8")
        environment["DS_ENV_FILE"] = scripts.environment_file(target)
    # torchrun itself ends what does not save in time
    margin = scripts.SECONDS_TO_SAVE - scripts.TORCHRUN_SECONDS
    return together.wait(
        (
            _over_ssh(host, words, environment) if host in away else together.start(words, environment)
            for host, words in starts
        ),
        int(environment[scripts.TORCHRUN_LIMIT]) + margin,
    )


def _over_ssh(host: str, words: list[str], environment: dict[str, str]) -> StartedProcess:
    """Start `main` on the host, which starts the words. ssh itself passes no signals on."""
    text = f"cd {shlex.quote(str(ssh.ROOT))} && exec {shlex.quote(sys.executable)} -m samecurve.launch.start"
    # a session of its own: Ctrl-C in the terminal would end ssh, and with it the connection
    process = subprocess.Popen(ssh.command(host, text), stdin=subprocess.PIPE, text=True, start_new_session=True)
    channel = process.stdin
    assert channel

    def send_line(line: str) -> None:
        channel.write(line)
        channel.flush()

    # variables may hold access tokens, and every user of a host can read the command lines of its processes
    send_line(json.dumps({"words": words, "environment": ssh.forwarded(environment)}) + "\n")
    return StartedProcess(process, lambda number: send_line(f"{signal.Signals(number).name}\n"))


def _check(launcher: str, target: Target, away: list[str]) -> None:
    """Raise one error with everything that is in the way."""
    problems = [*_problems_here(launcher, target)]
    if not problems:
        # pdsh logs in to every host of a hostfile, this machine too
        hosts = [host.name for host in target.hosts] if launcher == "deepspeed" and target.nodes > 1 else away
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            troubles = zip(hosts, pool.map(ssh.trouble, hosts), strict=True)
        said = ((host, trouble, f" ({trouble.seen})" if trouble and trouble.seen else "") for host, trouble in troubles)
        problems += [
            (trouble.kind, f"{host}: {trouble.problem}{seen}; {trouble.fix}") for host, trouble, seen in said if trouble
        ]
    if not problems and _port_in_use(target):
        head, port = target.hosts[0].name, target.port
        fix = f"choose another with --master_port, or stop the process that uses it (ss -ltnp 'sport = :{port}')"
        problems.append((TopologyError, f"{head}: port {port} is in use; {fix}"))
    if problems:
        raise problems[0][0]("\n".join(["the run cannot be started", *(f"  {text}" for _, text in problems)]))


def _problems_here(launcher: str, target: Target) -> Iterator[tuple[type[SamecurveError], str]]:
    """Yield the programs that are missing on this machine, and the hosts whose names it does not know."""
    wanted = {launcher: INSTALL}
    if launcher == "deepspeed" and target.nodes > 1:
        wanted["pdsh"] = "apt-get install pdsh, on this machine"
        # DeepSpeed 0.19, launcher/multinode_runner.py
        for path in dict.fromkeys([str(ssh.ROOT), sys.executable]):
            if set(path) & set(" \t'\"\\$&;|<>()`*?"):
                text = "deepspeed gives this path to the other hosts' shells without quotes"
                yield ConfigurationError, f"{path}: {text}; move it to one without spaces, or use another launcher"
    if not (limit := os.environ.get(scripts.TORCHRUN_LIMIT, "0")).isdecimal():
        yield ConfigurationError, f"{scripts.TORCHRUN_LIMIT}: found {limit!r}, expected a whole number of seconds"
    for name, fix in wanted.items():
        if not shutil.which(name, path=own_path(dict(os.environ))):
            yield ConfigurationError, f"{name}: not found; {fix}"
    for host in target.hosts if target.named else ():
        try:
            socket.getaddrinfo(host.name, None)
        except OSError as error:
            fix = "correct the name, give its address, or add it to /etc/hosts"
            yield TopologyError, f"{host.name}: unknown host ({error.strerror}); {fix}"


def _port_in_use(target: Target) -> bool:
    """Whether something on the first host listens at the port. Connecting is a test that leaves nothing behind."""
    head = target.hosts[0].name
    words = [sys.executable, "-c", _PROBE.format(port=target.port), head if target.nodes > 1 else "127.0.0.1"]
    if head and target.named and not ssh.is_here(head):
        try:
            return ssh.run(head, shlex.join(words), ssh.REACH_SECONDS).returncode == 1
        except subprocess.TimeoutExpired:
            text = f"{head}: no answer in {ssh.REACH_SECONDS:.0f} s when asked for its port; try ssh {head} true"
            raise TopologyError(text) from None
    return subprocess.run(words).returncode == 1


def own_path(environment: dict[str, str]) -> str:
    """Return PATH with this Python's folder first, where pip has put the launchers."""
    return os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])


def main() -> int:
    """Start one host's part of a job that was started on another one: `python -m samecurve.launch.start` behind ssh.

    The first line of standard input says what to start. Later lines are names of signals. Its end, which also comes
    when the connection is lost, is SIGTERM: the run saves and ends.

    Returns:
        The exit code; 127 if the program is missing.
    """
    terminal.set_up()
    order = json.loads(sys.stdin.readline())
    environment = {**os.environ, **order["environment"]}
    environment["PATH"] = own_path(environment)
    words = order["words"]
    program = shutil.which(words[0], path=environment["PATH"])
    if program is None:
        print(f"{words[0]}: not found on {os.uname().nodename}; {INSTALL} there", file=sys.stderr)
        return 127  # the shell's code for a missing command
    member = together.start([program, *words[1:]], environment)
    # a daemon, because nothing ends its wait for a line when the member has ended
    threading.Thread(target=_pass_on, args=(member.process,), daemon=True).start()
    return together.wait([member])


def _pass_on(process: subprocess.Popen) -> None:
    for line in sys.stdin:
        process.send_signal(signal.Signals[line.strip()])
    process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
