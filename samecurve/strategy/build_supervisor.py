"""A `ninja` for DeepSpeed's operators that ends with the process that asked for the build.

torch runs the first `ninja` on PATH in the operator's build folder. When a rank is killed, its ninja becomes a child of
init: the compilers go on for minutes and write into the folder in which the next start builds (seen). Therefore the
kernel is asked to send ninja SIGTERM when its parent is gone. ninja then ends its compilers, each of which it has put
into a process group of its own. Works on Linux only; elsewhere this is ninja itself.

Run by supervised/ninja, with ninja's arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

SUPERVISED = Path(__file__).with_name("supervised")
RANK = "SAMECURVE_BUILDS_FOR"  # the variable with the process id of the rank that asks for builds
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Become ninja; return 1 if the process that asked is gone, 127 if there is no ninja."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    search = [folder for folder in folders if Path(folder or ".").resolve() != SUPERVISED.resolve()]
    ninja = shutil.which("ninja", path=os.pathsep.join(search))
    if ninja is None:
        print("ninja: not found on PATH; pip install ninja", file=sys.stderr)
        return 127
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # kept by exec
    if rank := os.environ.get(RANK):
        import psutil  # after the path below is cleaned

        try:
            is_gone = psutil.Process(int(rank)).status() == psutil.STATUS_ZOMBIE
        except psutil.Error as error:
            is_gone = isinstance(error, psutil.NoSuchProcess)
        if is_gone:  # killed before the kernel was asked: no signal will come
            return 1
    os.execv(ninja, [ninja, *arguments])


if __name__ == "__main__":
    # not this folder, whose modules have names that packages may import
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
