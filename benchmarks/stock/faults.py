"""The same 20 faults against samecurve and against three loops made of stock parts, on one machine's CPU.

    python benchmarks/stock/faults.py [--loops accelerate trainer] [--faults SIGSTOP "bit flip"] [--keep FOLDER]

Each case: a run is hurt from outside (injuries.py), it has 90 seconds to end by itself, the same command is started
again and has as long to finish. What came of it goes into results.json beside this file; cases that were not run
again stay there. Linux only; the full disk needs root, to mount a small file system.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import injuries
import toy
from injuries import DAMAGE, FULL_DISK, LIVE, ONE_PROCESS, NotReached
from loops import LOOPS, NOTES, ROOT, Loop
from processes import Job

RESULTS = Path(__file__).with_name("results.json")
# A frozen rank: 20 s until the others' collective gives up, then torchrun waits 30 s for it before it kills it.
LIMIT_SECONDS = 90
SAME = 1e-5  # relative, of the loss of a step
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "safetensors")
DISK_BYTES = 256 << 20


class Bench:
    """One loop's cases, in a folder of its own."""

    def __init__(self, loop: Loop, work: Path):
        self.loop, self.work = loop, work / loop.name.replace(" ", "_")
        self.work.mkdir(parents=True)
        self.undisturbed: dict[int, float] = {}
        self._prepared: Path | None = None
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
        self.environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.environment |= {"SAMECURVE_CACHE": str(work / "cache"), "PYTHONUNBUFFERED": "1"}

    def run_undisturbed(self) -> None:
        directory = self._folder("undisturbed")
        job = self._start(directory)
        code = job.wait(injuries.START_SECONDS + LIMIT_SECONDS)
        job.remove()
        self.undisturbed = self.loop.losses(directory)
        if sorted(self.undisturbed) != list(range(1, toy.STEPS + 1)):
            sys.exit(f"{self.loop.name}: the undisturbed run ended with {code}\n{job.output()[-3000:]}")

    def case(self, fault: str) -> dict:
        if fault in DAMAGE:
            return self._damaged(fault)
        directory = self._folder(fault)
        if fault != FULL_DISK:
            return self._live(fault, directory)
        with SmallDisk(directory) as mounted:
            return self._live(fault, mounted) if mounted else {"outcome": "skipped", "note": "mounting needs root"}

    def _live(self, fault: str, directory: Path) -> dict:
        job = self._start(directory)
        facts: dict = {}
        try:
            LIVE[fault](job, self.loop, directory)
        except NotReached:
            facts["note"] = "the run ended before it could be hurt"
        began = time.monotonic()
        facts["first_exit_code"] = job.wait(LIMIT_SECONDS)
        facts["first_ended"] = job.ended
        facts["seconds_to_end"] = round(time.monotonic() - began, 1)
        facts["left_behind"] = job.left_behind() if job.ended else len(job.processes())
        job.remove()
        facts["first_error"] = _error(job.output(), directory)
        injuries.free_disk(directory)
        return self._second(fault, directory, facts)

    def _damaged(self, fault: str) -> dict:
        directory = self._folder(fault)
        shutil.copytree(self._killed_between_saves(), directory, dirs_exist_ok=True)
        name = DAMAGE[fault](self.loop, directory)
        facts = {"first_ended": True, "damaged": name}
        return self._second(fault, directory, facts, world=1 if fault == ONE_PROCESS else 2)

    def _killed_between_saves(self) -> Path:
        if self._prepared is None:
            self._prepared = self._folder("prepared")
            job = self._start(self._prepared)
            injuries.wait_for_step(job, self.loop, self._prepared, injuries.SECOND_SAVE + 3)
            job.ranks()
            job.kill_all()
            job.remove()
        return self._prepared

    def _second(self, fault: str, directory: Path, facts: dict, world: int = 2) -> dict:
        """Start the same command again, and compare the two starts' losses with the undisturbed run's."""
        loop, before = self.loop, self.loop.losses(directory)
        facts["checkpoints"] = {folder.name: _content(folder) for folder in loop.folders(directory)}
        loop.put_aside(directory)
        began = time.monotonic()
        job = self._start(directory, world)
        code = job.wait(LIMIT_SECONDS)
        facts |= {"second_exit_code": code, "second_ended": job.ended}
        facts["second_seconds"] = round(time.monotonic() - began, 1)
        job.remove()
        curve = before | loop.losses(directory)
        facts["last_step_before"], facts["last_step"] = max(before, default=0), max(curve, default=0)
        # whatever its exit code: about one gloo process in fifty aborts in its destructors, after all work was done
        facts["finished"] = facts["second_ended"] and facts["last_step"] == toy.STEPS
        if facts["finished"]:
            start = loop.start(directory)
            facts["start_step"] = facts["last_step_before"] if start is None else start
            facts["steps_lost"] = facts["last_step_before"] - facts["start_step"]
            facts["largest_difference"] = self._difference(curve)
        else:
            facts["second_error"] = _error(job.output(), directory)
        facts["named"] = bool(facts.get("damaged")) and facts["damaged"] in job.output().replace(str(directory), "")
        facts["accepted"] = accepted(facts)
        return facts | {"outcome": outcome(facts)}

    def _difference(self, curve: dict[int, float]) -> float | None:
        """The largest relative one of a step's loss; None for a loss that is no number."""
        pairs = [(curve.get(step, math.nan), loss) for step, loss in self.undisturbed.items()]
        if not all(math.isfinite(found) for found, _ in pairs):
            return None
        return max(abs(found - loss) / abs(loss) for found, loss in pairs)

    def _start(self, directory: Path, world: int = 2) -> Job:
        log = self.work / f"{directory.name}_{time.time_ns()}.log"
        return Job(self.loop.command(directory, self.work, world), log, self.environment, ROOT)

    def _folder(self, name: str) -> Path:
        folder = self.work / name.lower().replace(" ", "_").replace("'", "")
        folder.mkdir()
        return folder


class SmallDisk:
    """A file system of its own, as a context manager; None where it cannot be mounted."""

    def __init__(self, folder: Path):
        self.folder, self.mounted = folder, False

    def __enter__(self) -> Path | None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder)]
        self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        if not self.mounted:
            return None
        (self.folder / "full_disk").mkdir()
        return self.folder / "full_disk"

    def __exit__(self, *_) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


def accepted(facts: dict) -> bool:
    """Whether the run went on from the damaged checkpoint, or from a part of it, as if nothing was wrong with it."""
    if not facts.get("damaged") or facts["named"] or not facts["finished"]:
        return False
    return facts["start_step"] == injuries.SECOND_SAVE or _differs(facts)


def _differs(facts: dict) -> bool:
    return facts["largest_difference"] is None or facts["largest_difference"] > SAME


def outcome(facts: dict) -> str:
    """One word for a case, the worst that is true."""
    if not (facts["first_ended"] and facts["second_ended"]):
        return "hung"
    if not facts["finished"]:
        return "does not start"
    if facts["accepted"]:
        return "silently damaged"
    if _differs(facts):
        return "another curve"
    return "started over" if facts["start_step"] == 0 else "same curve"


def _content(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _error(output: str, directory: Path) -> str:
    """The first line that looks like what went wrong, without this machine's paths; "" for none."""
    words = ("Error:", "Exception:", "exit code", "preempted", "Fatal")
    for line in output.splitlines():
        if any(word in line for word in words) and "torch.distributed.elastic" not in line:
            text = line.strip().replace(str(directory), "RUN").replace(sys.prefix, "ENVIRONMENT")
            return text[:300]
    return ""


def table(cases: list[dict], loops: list[str]) -> str:
    found = {(case["loop"], case["fault"]): case["outcome"] for case in cases}
    width = max(map(len, (*LIVE, *DAMAGE))) + 2
    lines = ["".ljust(width) + "".join(name.ljust(18) for name in loops)]
    for fault in (*LIVE, *DAMAGE):
        lines.append(fault.ljust(width) + "".join(found.get((name, fault), "-").ljust(18) for name in loops))
    return "\n".join(lines)


def write(cases: list[dict]) -> None:
    """With the earlier results of the cases that were not run this time, unless something else was measured then."""
    header = {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "machine": {"system": platform.system(), "processor": platform.machine(), "cpus": os.cpu_count()},
        "settings": {
            "processes": 2,
            "steps": toy.STEPS,
            "save_every": toy.SAVE_EVERY,
            "keep": toy.KEEP,
            "collective_timeout_seconds": toy.TIMEOUT.total_seconds(),
            "limit_seconds": LIMIT_SECONDS,
            "same_curve": SAME,
        },
    }
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    done = {(case["loop"], case["fault"]) for case in cases}
    same = all(earlier.get(key) == value for key, value in header.items())
    merged = [case for case in earlier["cases"] if (case["loop"], case["fault"]) not in done] if same else []
    order = [(loop, fault) for loop in LOOPS for fault in (*LIVE, *DAMAGE)]
    merged = sorted(merged + cases, key=lambda case: order.index((case["loop"], case["fault"])))
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(header | {"cases": merged}, indent=1) + "\n")
    partial.replace(RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS), metavar="LOOP")
    parser.add_argument("--faults", nargs="+", default=[""], help="parts of the names; default: all", metavar="PART")
    parser.add_argument("--keep", type=Path, help="a new folder for all runs and outputs; default: removed at the end")
    arguments = parser.parse_args()
    chosen = [fault for fault in (*LIVE, *DAMAGE) if any(part in fault for part in arguments.faults)]
    if not chosen:
        parser.error(f"--faults {arguments.faults}: no such fault; there are {', '.join((*LIVE, *DAMAGE))}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would the runs
    cases: list[dict] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.keep or Path(temporary)
        for name in arguments.loops:
            bench = Bench(LOOPS[name], work.resolve())
            bench.run_undisturbed()
            for fault in chosen:
                began = time.monotonic()
                case = {"loop": name, "fault": fault, "date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
                case |= bench.case(fault)
                if (name, fault) in NOTES:
                    case["note"] = NOTES[name, fault]
                cases.append(case)
                write(cases)
                print(f"{name}: {fault}: {case['outcome']} ({time.monotonic() - began:.0f} s)", flush=True)
    print("\n" + table(cases, arguments.loops))


if __name__ == "__main__":
    main()
