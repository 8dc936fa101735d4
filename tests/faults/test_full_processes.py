"""Every phase of saving and loading, every signal, launcher and strategy: run by scripts/test.sh --full."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from battery import Case, Expected, Victim
from harness import SAVE_EVERY, STEPS
from started import Started, send

from samecurve.run.status import read_status

pytestmark = pytest.mark.full

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero2_offload", "pipeline")
STRATEGIES += ("tp", "fsdp_ulysses", "fsdp_cp", "fsdp_ep", "pipeline_1f1b", "pipeline_zbv")
STRATEGIES += ("pipeline_gpipe", "pipeline_interleaved", "pipeline_dualpipev")
FOUR = ("fsdp_tp", "hsdp", "pipeline_fsdp", "fsdp_tp_cp", "fsdp_ep_tp", "zero3_hpz")
WORLDS = {**dict.fromkeys(FOUR, 4), "pp_fsdp_tp": 8}
CASES = [*map(Case, STRATEGIES), *(Case(name, world) for name, world in WORLDS.items())]
WITH_LORA = [Case(name, lora=True) for name in ("ddp", "zero3")]
BEFORE = ("save.staged", "save.prepare", "save.write", "save.fsync", "save.agree")  # on every rank
ONLY_RANK_0 = ("save.manifest", "save.marker", "save.rename")
LOADING = ("load.verify", "load.read", "load.done")
COMMITTED = ("save.renamed", "save.rotate")
DEAD = r"rank {} \(pid \d+\) died"
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.mark.parametrize("case", [*CASES, *WITH_LORA], ids=str)
def test_killed_in_every_phase(case, battery):
    victim = battery.victim(case)
    newest = SAVE_EVERY
    victim.hurt("kill", "SIGKILL step", Expected(1, DEAD.format(0), newest), faults="step@9:0:kill")
    for index, phase in enumerate((*BEFORE, *ONLY_RANK_0, *LOADING, *COMMITTED)):
        rank = index % case.world if phase in (*BEFORE, *LOADING) else 0
        newest += SAVE_EVERY if phase in COMMITTED else 0
        # with two that stay, the third one makes the first one go
        keep = ["checkpoint.keep=2"] if phase == "save.rotate" else []
        expected = Expected(1, DEAD.format(rank), newest)
        victim.hurt("kill", f"SIGKILL {phase}", expected, *keep, faults=f"{phase}:{rank}:kill")
    victim.finish()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dead_and_frozen_ranks(case, battery):
    victim = battery.victim(case)
    limit = "watchdog.timeout_seconds=10"
    for rank, action in ((0, "stop"), (case.world - 1, "hang")):
        place = f"step@{SAVE_EVERY + 2}:{rank}"
        dead = Expected(1, DEAD.format(rank), victim.newest() + SAVE_EVERY)
        victim.hurt("kill", f"SIGKILL of rank {rank}", dead, faults=f"{place}:kill")
        frozen = Expected(124, rf"no progress for 10 s .* rank {rank} \(pid \d+\)", victim.newest() + SAVE_EVERY)
        victim.hurt("hang", f"{action} of rank {rank}", frozen, limit, faults=f"{place}:{action}")
    frozen = Expected(124, r"no progress for 10 s .* rank 1 \(pid \d+\) shows no sign of life", victim.newest())
    victim.hurt("hang", "stop of rank 1 as it loads", frozen, limit, faults="load.read:1:stop")
    victim.finish()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signals_to_everyone(launcher, number, battery):
    """A launcher that does not know a signal dies of it, which is a request too."""
    victim = battery.victim()
    says = r"preempted \(exit code 75\): (?:SIG\w+|the launcher ended): saved after step \d+"
    for who in ("launcher", "rank 0", "rank 1", "all"):
        do = send(who, number, after_step=victim.newest() + 2)
        expected = Expected(75, says, state="preempted", lost=0)
        victim.hurt("signal", f"{number.name} to {who}", expected, faults="step@3:0:slow", do=do, launcher=launcher)
    victim.finish(launcher=launcher)


def when_running(victim: Victim, number: int):
    """A signal to the launcher, once all ranks import torch, which they do when they are supervised."""

    def do(started: Started) -> None:
        status = victim.directory / "status.json"
        began = time.time() - 5

        def is_running() -> bool:
            if not status.exists() or status.stat().st_mtime <= began or read_status(status).get("state") != "running":
                return False
            maps = []
            for process in started.ranks().values():
                with contextlib.suppress(OSError):  # it ends meanwhile
                    maps.append(Path(f"/proc/{process.pid}/maps").read_text())
            return len(maps) == victim.case.world and all("libtorch" in each for each in maps)

        started.wait_for(is_running, "its status and its imports")
        started.process.send_signal(number)

    return do


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_signals_in_every_phase(launcher, number, battery):
    if number == signal.SIGUSR1:
        pytest.skip("launchers die of SIGUSR1; test_signals_to_everyone has that")
    victim = battery.victim()
    # deepspeed dies of SIGINT and leaves its second process and the ranks alone: they see that it is gone, or get a
    # SIGTERM from that one, whichever comes first
    dies = launcher == "deepspeed" and number == signal.SIGINT
    told = "(?:the launcher ended|SIGTERM)" if launcher == "deepspeed" else number.name
    ended = rf"(?:ended by )?{told} in phase {{}}.* \(exit code \d+\)"
    code = 128 + (signal.SIGTERM if dies else number)
    victim.hurt(
        "signal",
        f"{number.name} while it starts",
        Expected(code, ended.format("(?:start|build)"), 0),
        faults="build:0:slow",
        do=when_running(victim, number),
        launcher=launcher,
    )
    says = rf"preempted \(exit code 75\): {told}: saved after step \d+"
    for phase, after_step in (("evaluate", 9), ("save", 4), ("boundary", 2)):
        after_step += victim.newest() if phase == "boundary" else 0
        faults = "boundary@3:0:slow" if phase == "boundary" else f"{phase}:0:slow"
        if phase == "save":
            after_step = victim.newest() - victim.newest() % SAVE_EVERY + SAVE_EVERY - 1
        victim.hurt(
            "signal",
            f"{number.name} in phase {phase}",
            Expected(75, says, state="preempted", lost=0),
            faults=faults,
            do=send("launcher", number, after_step),
            launcher=launcher,
        )
    victim.hurt(
        "signal",
        f"{number.name} in phase export",
        Expected(code, ended.format("(?:boundary|export)"), STEPS),
        faults="export:0:slow",
        do=send("launcher", number, STEPS),
        launcher=launcher,
    )
    victim.finish(launcher=launcher)


@pytest.fixture
def small_disk(tmp_path):
    """40 MiB; a save wants 16 MiB of them free."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def fill(folder: Path, leave: int) -> Path:
    balloon = folder / "balloon"
    free = int(subprocess.check_output(["df", "--output=avail", "-B1", folder]).split()[-1])
    try:
        balloon.write_bytes(bytes(max(free - leave, 0)))
    except OSError:  # the run has written in the meantime
        os.truncate(balloon, max(balloon.stat().st_size - leave, 0))
    return balloon


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_disk_that_is_really_full(strategy, battery, small_disk):
    victim = battery.victim(Case(strategy))
    victim.directory = small_disk / "run"
    balloon = fill(small_disk, leave=4 << 20)
    says = r"StorageError \(exit code 7\)\n.*/checkpoints: 0 GiB are free, but up to \d+ checkpoints of"
    victim.hurt("disk", "too small a disk", Expected(7, says, 0, lost=None))
    balloon.unlink()

    def fill_while_it_writes(started: Started) -> None:
        partial = victim.directory / "checkpoints" / ".partial-step_00000010" / "rank_00001.safetensors"
        started.wait_for(partial.exists, "the second save")
        fill(small_disk, leave=100_000)
        failed = "the checkpoint of step 10 was not written"
        started.wait_for(lambda: failed in started.output, "its failure")
        balloon.unlink()

    # the step after it waits for the disk to have room again
    faults = "save.write@2:1:slow,step@12:0:slow,step@13:0:slow"
    says = r"the checkpoint of step 10 was not written: .*ENOSPC"
    victim.hurt(
        "disk", "full while it writes", Expected(0, says, STEPS, "done"), faults=faults, do=fill_while_it_writes
    )
    victim.is_golden()
