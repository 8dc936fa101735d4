"""A run that is killed while DeepSpeed builds CPU Adam leaves no compiler behind. The compiler here only sleeps."""

from __future__ import annotations

import os
import shutil
import stat
import time

import psutil
import pytest
from battery import Case, Victim
from started import Started

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here"),
]

# torch asks the compiler for its version, too
SLEEPS = """#!/bin/sh
case "$*" in
  *" -c "*) touch "$(dirname "$0")/compiles.$$"; sleep 300 ;;
  *) exec c++ "$@" ;;
esac
"""


@pytest.mark.parametrize("who", ["launcher", "the rank that builds"])
def test_the_compilers_end_with_the_run(who, battery, tmp_path):
    compiler = tmp_path / "sleeping_c++"
    compiler.write_text(SLEEPS)
    compiler.chmod(stat.S_IRWXU)
    victim = Victim(battery, Case("zero2_offload"), tmp_path / "victim")
    started = victim.start(CXX=str(compiler), TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    try:
        started.wait_for(lambda: any(tmp_path.glob("compiles.*")), "a compiler")
        (started.process if who == "launcher" else builder(started)).kill()
        killed = time.monotonic()
        while any(process.name() in ("ninja", "sleep") for process in started.all()):
            assert time.monotonic() - killed < 30
            time.sleep(0.2)
    finally:
        hung = not started.wait()
    assert not hung and not started.left, started.output


def builder(started: Started) -> psutil.Process:
    (ninja,) = (process for process in started.all() if process.name() == "ninja")
    parent = ninja.parent()
    assert parent is not None and parent.environ().get("RANK") in ("0", "1") and parent.pid != os.getpid()
    return parent
