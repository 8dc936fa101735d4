"""One case's run: its command, its time limit, and the row that it leaves in the results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samecurve.bench.jobs import StrategyJob, command, set_aside
from samecurve.config.inheritance import latest_overrides
from samecurve.distributed.affinity import share_of_cores
from samecurve.run.run_directory import read_metrics
from samecurve.storage.atomic import utc_timestamp
from samecurve.storage.records import read_record
from samecurve.strategy.preflight import prepare_allocator

from .cases import HERE, MEASURED, ROOT, WARM_UP, Case
from .material import TEXT_BYTES, write_text

TRAINER = ROOT / "benchmarks" / "speed" / "trainer_loop.py"
TOY_TEXT_BYTES = 200_000
TAIL_CHARACTERS = 2000  # of a failed run's log, for whoever has the results alone
KILLED_SECONDS = 60.0  # a process that was killed is waited for so long


@dataclass(frozen=True)
class Places:
    """folder: where runs, the text, the model folder and caches lie."""

    folder: Path
    toy: bool

    def text(self) -> Path:
        return write_text(self.folder / "text.txt", TOY_TEXT_BYTES if self.toy else TEXT_BYTES)

    def weights(self, case: Case) -> Path:
        return self.folder / Path(case.recipe).stem

    def output(self, case: Case) -> Path:
        return self.folder / "runs" / re.sub(r"[^\w.=-]", "_", case.name)


def settings(case: Case, places: Places) -> list[str]:
    """The overrides, as on the command line."""
    found = [f"steps={case.num_steps}", *case.overrides]
    if case.data == "text":
        found.append(f"data.path={places.text()}")
    elif case.data == "conversations":
        found += ["task=sft", "data.path=builtin:python-functions"]
    found.append(f"model.path={places.weights(case)}")
    if case.profiled:
        found.append(f"profile.steps=[{WARM_UP + MEASURED + 2}, {case.num_steps}]")
    return latest_overrides(found)


def arguments(case: Case, places: Places, output: Path) -> list[str]:
    """The command of a case."""
    recipe = str(HERE / case.recipe)
    if case.program == "matmul":
        small = ["--sizes", "64,128", "--seconds", "0.01"] if places.toy else []
        return [sys.executable, "-m", "samecurve", "bench", "matmul", recipe, *small, "--json", f"{output}.json"]
    if case.program == "trainer":
        given = settings(case, places)
        return [sys.executable, str(TRAINER), recipe, f"{output}.json", *case.arguments, *given]
    path = None if case.strategy == "single" else Path("configs", f"{case.strategy}.yaml")
    job = StrategyJob(case.strategy, path, case.num_processes)
    # the export takes longer than the steps that are timed
    return command(job, recipe, [*settings(case, places), "export.enabled=false"], output)


def environment(case: Case, places: Places) -> dict[str, str]:
    """One device where one process runs: Trainer would spread over all that it sees. And the same allocator for all."""
    found = {"SAMECURVE_CACHE": str(places.folder / "cache"), "HF_HUB_OFFLINE": "1", **os.environ}
    found.setdefault("OMP_NUM_THREADS", str(share_of_cores(case.num_processes)))
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if case.num_processes == 1 and not places.toy:
        found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    prepare_allocator(found)
    return found


def measure(case: Case, places: Places, limit: float) -> dict:
    """The case's row: `state` done, failed, out of memory or time limit, and either numbers or a `reason`.

    limit: seconds, in which a model folder that is not there yet is written, too.
    """
    output, start = places.output(case), time.perf_counter()
    output.parent.mkdir(parents=True, exist_ok=True)
    set_aside(output)
    row = {"definition": case.definition, "date": utc_timestamp()}
    for step, log in _steps(case, places, output):
        code = execute(step, log, environment(case, places), limit - (time.perf_counter() - start))
        if code != 0:
            return row | failure(code, log, output, limit) | {"log_tail": _text(log)[-TAIL_CHARACTERS:]}
    row |= {"state": "done", "seconds": time.perf_counter() - start}
    if case.program == "matmul":
        return row | ceilings(read_record(output.with_name(f"{output.name}.json")).value or {})
    if case.program == "trainer":
        return row | numbers(json.loads(output.with_name(f"{output.name}.json").read_text()))
    return row | numbers(read_metrics(output), read_record(output / "run.json").value or {}, profile(output))


def _steps(case: Case, places: Places, output: Path) -> list[tuple[list[str], Path]]:
    """(command, log) of what has to run, in order."""
    found = [(arguments(case, places, output), output.with_name(f"{output.name}.log"))]
    folder = places.weights(case)
    if case.program != "matmul" and not folder.exists():
        write = [sys.executable, "-m", "benchmarks.gpu.material", str(HERE / case.recipe), str(folder)]
        found.insert(0, (write, folder.with_name(f"{folder.name}.log")))
    return found


def execute(step: Sequence[str], log: Path, environ: Mapping[str, str], limit: float) -> int | None:
    """The exit code, None where time was up. All its processes are gone then: killed, because one that is asked to stop
    would write a checkpoint first."""
    if limit <= 0:
        return None
    # a process group to kill, in the session that this program is in: whatever ends that ends the run, too
    around = {"cwd": ROOT, "env": dict(environ), "stdin": subprocess.DEVNULL, "preexec_fn": os.setpgrp}
    with open(log, "w", encoding="utf-8") as stream:
        process = subprocess.Popen(step, stdout=stream, stderr=subprocess.STDOUT, **around)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)


def _kill(process: subprocess.Popen) -> None:
    """With all that it started, also torchrun's workers, which are in sessions of their own, and those first: without a
    launcher they would save and end by themselves."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError):  # what a process that is gone left in its group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILLED_SECONDS)


def failure(code: int | None, log: Path, output: Path, limit: float) -> dict:
    """A row without numbers. code: see `execute`."""
    text = _text(log)
    if code is None:
        return {"state": "time limit", "reason": f"not through after {limit:,.0f} s"}
    if re.search(r"OutOfMemoryError|out of memory", text):
        return {"state": "out of memory", "reason": _line(text, r"(?:OutOfMemoryError|out of memory).*")}
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return {"state": "out of memory", "reason": "killed by the system, as it is when host memory ends"}
    told = (read_record(output / "status.json").value or {}).get("reason") or _problem(text)
    return {"state": "failed", "reason": f"{told} (code {code}, {log.name})"}


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _problem(text: str) -> str:
    """The first problem of a configuration error's report, else the last line."""
    found = re.search(r"Error \(exit code \d+\)\n.*\n  (.+)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return found[1].strip() if found else (lines[-1] if lines else "it said nothing")


def _line(text: str, pattern: str) -> str:
    return re.search(pattern, text)[0].strip()[:200]


def numbers(metrics: Sequence[Mapping], run: Mapping | None = None, idle_share: float | None = None) -> dict:
    """Of the measured steps; metrics: of all. run: run.json, of a program that has one."""
    counted = metrics[WARM_UP : WARM_UP + MEASURED]
    seconds = sum(each["step_seconds"] for each in counted)
    found = {
        "tokens_per_second": sum(each["tokens"] for each in counted) / seconds,
        "step_seconds": [each["step_seconds"] for each in counted],
        "peak_memory_gib": max(each["peak_memory_gib"] for each in metrics[: WARM_UP + MEASURED]),
        "losses": [each["loss"] for each in metrics],
        "not_in_kernels": idle_share,
    }
    for name in ("mfu", "hfu"):
        values = [(each.get(name), each["step_seconds"]) for each in counted]
        known = all(value is not None for value, _ in values)
        found[name] = sum(value * took for value, took in values) / seconds if known else None
    return found | (_of_run(run) if run else {})


def _of_run(run: Mapping) -> dict:
    flops = run["flops"]
    keys = "model_per_token", "causal_per_token", "hardware_per_token", "peak_tflops", "peak_source"
    whole = run["num_parameters"] == run["num_trained_parameters"]
    return {
        "engine": run["engine"],
        "world_size": run["world_size"],
        "num_parameters": run["num_parameters"],
        "trains_all": whole,
        "flops": {key: flops.get(key) for key in keys},
    }


def profile(output: Path) -> float | None:
    """The share of time in which no kernel ran, of the steps that were recorded; of a device's profile alone."""
    found = read_record(output / "profile" / "summary.json").value or {}
    if not found.get("on_device"):
        return None
    return found["shares"]["idle"] + found["shares"]["data_wait"]


def ceilings(found: Mapping) -> dict:
    """Of `bench matmul`'s JSON: the best square of each precision, the recipe's layers, and copies."""
    best = {name: max(rates.values()) for name, rates in found["tflops"].items()}
    layers = {", ".join(each["layer"]["names"]): each["tflops"] for each in found.get("layers", [])}
    return {"tflops": best, "layers_tflops": layers, "copies_gb_per_second": found["copies_gb_per_second"]}
