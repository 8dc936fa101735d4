"""One host's part of a job that was started on another one: `python -m samecurve.launch.here` behind ssh.

The first line of standard input says what to start. Later lines are names of signals. Its end, which also comes when
the connection is lost, is SIGTERM: the run saves and ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from samecurve.launch import together
from samecurve.specs.environment import INSTALL
from samecurve.storage import terminal


def order(words: list[str], environment: dict[str, str]) -> str:
    """Return the first line of standard input: what to start, and the environment variables to add.

    The variables may hold access tokens, and every user of a host can read the command lines of its processes.
    """
    return json.dumps({"words": words, "environment": environment}) + "\n"


def own_path(environment: dict[str, str]) -> str:
    """Return PATH with this Python's folder first, where pip has put the launchers."""
    return os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])


def main() -> int:
    """Start what standard input says, pass signals on, and return the exit code; 127 if the program is missing."""
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
