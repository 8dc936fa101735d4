"""One run that is killed 200 times, at random times and in random ways, and ends as if it had never been."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from battery import Case, Record, Victim
from harness import Run, rank_hashes
from started import LIMIT_SECONDS, Started

from samecurve.run.run_directory import read_metrics

pytestmark = pytest.mark.full

NUM_KILLS = int(os.environ.get("SAMECURVE_TEST_KILLS", "200"))
STEPS_PER_KILL = 40
EVERY = 10
SLOWEST = 10  # steps per second
COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples")


def kill_at(draw: random.Random, started: Started) -> str:
    """One rank, the launcher or all; mostly while it trains, sometimes while it starts."""
    if draw.random() < 0.1:
        time.sleep(draw.uniform(0, 6))
    else:
        metrics, since = started.directory / "run.json", time.time() - 0.5
        started.wait_for(lambda: metrics.exists() and metrics.stat().st_mtime > since, "the first step")
        time.sleep(draw.uniform(0, 1.5))
    who = draw.choice(["rank 0", "rank 1", "all", "launcher"])
    process = started.ranks().get({"rank 0": 0, "rank 1": 1}.get(who))
    if process is not None and process.is_running():
        process.kill()
    elif who.startswith("rank"):
        who = "launcher"  # which has not started it yet
    if who == "launcher":
        started.process.kill()
    if who == "all":
        os.killpg(started.process.pid, signal.SIGKILL)
    return who


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_many_kills(strategy, battery):
    draw, case = random.Random(0), Case(strategy)
    num_kills = NUM_KILLS if strategy == "ddp" else NUM_KILLS // 4
    steps = num_kills * STEPS_PER_KILL
    more = (f"steps={steps}", f"checkpoint.every_steps={EVERY}", "evaluate.every_steps=500", "checkpoint.keep=2")
    victim = battery.victim(case)
    golden = battery.workspace.run(strategy, 2, *battery.overrides(case), *more)
    assert golden.returncode == 0, golden.output
    done = most_lost = most_while_saving = 0
    while done < num_kills and not (victim.directory / "model").exists():
        started = victim.start("", "", *more)
        who = kill_at(draw, started)
        record = Record(strategy, 2, "torchrun", "random", f"SIGKILL of {who}")
        record.hung = not started.wait()
        record.left_behind, record.seconds = started.left, round(started.seconds, 1)
        lost, while_saving = losses(victim)
        record.lost_steps, record.steps_while_saving = lost, while_saving
        most_lost, most_while_saving = max(most_lost, lost), max(most_while_saving, while_saving)
        victim.records.append(record)
        done += 1
        assert not record.hung and not record.left_behind, started.output
        assert lost - while_saving <= EVERY, (lost, while_saving)
    assert done == num_kills, f"it was done after {done} kills: give it more steps"
    started = victim.start("", "", *more)
    started.wait(LIMIT_SECONDS + steps / SLOWEST)  # on a busy machine the kills come early, and most steps are left
    run = Run(victim.directory, started.process.returncode, started.output)
    equal = False
    try:
        assert run.returncode == 0, run.output
        for name in COLUMNS:
            assert run.column(name) == golden.column(name), name
        assert rank_hashes(run.checkpoint(steps)) == rank_hashes(golden.checkpoint(steps))
        equal = True
    finally:
        victim.write(equal)
    print(f"{done} kills, at most {most_lost} steps lost, {most_while_saving} of them while a checkpoint was written")


def losses(victim: Victim) -> tuple[int, int]:
    """(steps that have to be done again, how many of them ran while a checkpoint was being written)."""
    metrics = read_metrics(victim.directory)
    last, newest = (metrics[-1]["step"] if metrics else 0), victim.newest()
    begun = last - last % EVERY
    return max(last - newest, 0), max(last - begun, 0) if begun > newest else 0
