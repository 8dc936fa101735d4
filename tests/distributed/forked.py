"""Ranks of a script as torchrun would start them, but forked from one process that has imported the libraries once.

A start of train.py takes 6 to 10 seconds on two cores, and all but one or two of them are imports. The launchers
themselves, single processes and everything about signals and deaths have tests with real starts.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAILED_SECONDS = 30.0  # for the others to end when one has failed, as torchrun gives them


def run(
    script: Path, arguments: Sequence[str], world: int, port: int, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Like subprocess.run with the output as text, stdout and stderr together. Exit code 1 when any rank fails.

    world: 0 is plain python, one process without torchrun's variables, whose exit code is its own.
    """
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torchrun = sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forked"}
    each = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **torchrun} for rank in range(world)] or [{}]
    with tempfile.TemporaryFile() as output:
        ranks = [_start(script, [str(script), *arguments], environment | more, output.fileno()) for more in each]
        failed, hung = _wait(ranks, timeout)
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert not hung, f"{hung} of {len(ranks)} ranks did not end within {timeout:g} s:\n{text}"
    code = int(failed) if world else ranks[0].exitcode
    return subprocess.CompletedProcess([str(script), *arguments], code, text, "")


def _start(script: Path, argv: list[str], environment: dict[str, str], output: int) -> multiprocessing.Process:
    from multiprocessing.reduction import DupFd

    context = _context(tuple((name, environment[name]) for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PATH")))
    with _without_main():
        process = context.Process(target=_rank, args=(script, argv, environment, DupFd(output)))
        process.start()
    return process


@cache
def _context(before_imports: tuple[tuple[str, str], ...]) -> multiprocessing.context.ForkServerContext:
    """before_imports: what libraries read from the environment when they are imported."""
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    own = {**dict(before_imports), "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1])))}
    known = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        ensure_running()
    finally:
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


@contextmanager
def _without_main():
    """Children would import the main module again, which is pytest."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    try:
        for name in hidden:
            delattr(main, name)
        main.__spec__ = None
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _rank(script: Path, argv: list[str], environment: dict[str, str], output) -> None:
    """In the child."""
    descriptor = output.detach()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable()  # SIGABRT tells where it was
    os.environ.clear()
    os.environ.update(environment)
    root = environment["PYTHONPATH"]
    os.chdir(root)
    sys.argv[:] = argv
    sys.path[0:0] = [str(script.parent), root]
    runpy.run_path(str(script), run_name="__main__")


def _wait(ranks: list[multiprocessing.Process], timeout: float) -> tuple[bool, int]:
    """Whether any failed, and how many did not end though none had. When one has, the others have to end soon."""
    deadline, failed = time.monotonic() + timeout, False
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if not failed and any(rank.exitcode for rank in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + FAILED_SECONDS)
            for rank in ranks:
                rank.terminate()
        time.sleep(0.02)
    hung = [rank for rank in ranks if rank.is_alive()]
    for rank in hung:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(rank.pid, signal.SIGABRT)
        rank.join(FAILED_SECONDS)
        rank.kill()
    for rank in ranks:
        rank.join()
    return failed or any(rank.exitcode for rank in ranks), 0 if failed else len(hung)
