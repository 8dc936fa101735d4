"""What a step frees is there for the next one: glibc keeps it where it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from samecurve.engines import start

ROOT = Path(__file__).resolve().parents[2]
PAGES = 2**25 // 4096
PROBE = f"""
import ctypes
import resource
import sys

import torch

from samecurve.engines.start import keep_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of 4 KiB wherever this runs
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
for round in range(25):
    if round == 5:  # aligned blocks leave holes of their size at first
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({2**25}, dtype=torch.int8)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_taken_again_without_page_faults():
    kept, faults = probe("keep")
    assert kept and faults < 8 * PAGES  # of 20 rounds; 4 seen
    kept, faults = probe("leave")
    assert not kept and faults > 15 * PAGES  # the reason for it; where glibc learns better, it may go


def probe(wanted: str) -> tuple[bool, int]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROBE, wanted]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"])
def test_settings_of_the_user_stay(name):
    assert not start.keep_freed_memory({name: "1"})
    assert not start.keep_freed_memory({"GLIBC_TUNABLES": f"glibc.malloc.{name[7:].lower().strip('_')}=1"})


@pytest.mark.parametrize(
    ("most", "told"),
    [
        (2**31, [(-3, 2**26), (-1, 2**31 - 1)]),
        (2**25, [(-3, 2**26), (-3, 2**25), (-1, 2**31 - 1)]),  # glibc before 2.35
        (0, [(-3, 2**26), (-3, 2**25)]),
    ],
)
def test_other_c_libraries(most, told, monkeypatch):
    seen = []

    def mallopt(name: int, value: int) -> int:
        seen.append((name, value))
        return int(name == -1 or value <= most)

    monkeypatch.setattr(start.sys, "platform", "linux")
    monkeypatch.setattr(start.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert start.keep_freed_memory({}) is (most > 0) and seen == told
    monkeypatch.setattr(start.ctypes, "CDLL", lambda _: SimpleNamespace())  # musl
    assert not start.keep_freed_memory({})
