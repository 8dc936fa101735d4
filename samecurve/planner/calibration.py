"""Lessons of runs and of bench about a machine: factors of the predicted parts of a step, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import write_json
from samecurve.storage.cache import cache_folder
from samecurve.storage.records import read_record

COMMUNICATION = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends", "data_parallel", "offload")
GROUPS: tuple[str, ...] = ("compute", "communication", "host")
LARGEST_FACTOR = 1e9  # of a part of a step or of memory; a file with a larger one, or its inverse, is damaged
WIDEST = 50.0  # the same as a logarithm, for intervals
ALONE = "one process"  # key of a GPU's process_gib without communicators


def group(part: str) -> str:
    """Name the factor of a part of the step: an efficiency, a bandwidth or the host's floor."""
    return "communication" if part in COMMUNICATION else "host" if part == "host" else "compute"


@dataclass(frozen=True)
class Calibration:
    """Corrections for one kind of hardware, learnt from runs or results of bench.

    Attributes:
        kind: the GPU's kind, or cpu.
        origin: what the runs ran on: `processor` (of a CPU), `device`, `versions`, `date` and the `runs`' folders.
        time: factor by group of the parts of a step.
        stack_time: factor of the whole step by Job.library; empty where the runs are all of one.
        memory: measured over predicted tensors by library, "" for the others.
        process_gib: memory of a process beside its tensors by library, "" for the others, and on a GPU ALONE for a
            process that has no others to communicate with.
        time_interval, memory_interval: 80 % interval, as logarithms of measured over predicted; None: as shipped.
        path: of the file that it was read from.
    """

    kind: str
    origin: Mapping[str, Any] = field(default_factory=dict)
    time: Mapping[str, float] = field(default_factory=dict)
    stack_time: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    process_gib: Mapping[str, float] = field(default_factory=dict)
    time_interval: tuple[float, float] | None = None
    memory_interval: tuple[float, float] | None = None
    path: str = ""

    def time_factor(self, part: str, library: str) -> float:
        return self.time.get(group(part), 1.0) * self.stack_time.get(library, 1.0)

    def memory_factor(self, library: str) -> float:
        return self.memory.get(library, self.memory.get("", 1.0))

    def process(self, library: str, processes: int) -> float | None:
        """Return the GiB beside the tensors of one of a job's processes; None if nothing has measured it."""
        names = [*([ALONE] if processes == 1 else []), library, ""]
        return next((self.process_gib[name] for name in names if name in self.process_gib), None)

    def describe(self) -> str:
        """Say in a few words what the constants come from."""
        counts = {"run": len(self.origin.get("runs", ())), "result of bench": len(self.origin.get("bench", ()))}
        plural = {"run": "runs", "result of bench": "results of bench"}
        named = [f"{count} {name if count == 1 else plural[name]}" for name, count in counts.items() if count]
        what = "" if self.time or self.memory or not self.process_gib else "only the memory beside tensors "
        return f"{what}calibrated on {' and '.join(named)}, {str(self.origin.get('date', ''))[:10]}: {self.path}"

    def warnings(self, kind: str, processor: str, versions: Mapping[str, str | None]) -> list[str]:
        """List how the machine and the libraries that are planned for differ from those of the runs."""
        differences = []
        if kind != self.kind:
            differences.append(f"measured on {self.kind}, not on {kind}: its factors are not used")
        elif kind == "cpu" and self.origin.get("processor", processor) != processor:
            differences.append(f"measured on {self.origin['processor']}, this is {processor}")
        measured = self.origin.get("versions", {})
        for name in ("torch", "deepspeed", "accelerate"):
            if name in measured and measured[name] != versions.get(name):
                differences.append(f"measured with {name} {measured[name]}, here is {versions.get(name) or 'none'}")
        return differences


def default_path(kind: str) -> Path:
    """Return the file that later plans and runs of this kind of hardware read."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in kind)
    return cache_folder(None) / "planner" / f"{safe}.json"


def write(learnt: Calibration, path: Path) -> None:
    """Write the calibration. Raises StorageError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {key: value for key, value in asdict(learnt).items() if key != "path"})


_FACTORS = {"*": float}
_SCHEMA = {
    "kind?": str,
    "origin?": {
        **{"runs?": list, "bench?": list, "versions?": dict},
        **dict.fromkeys(("device?", "processor?", "date?"), (str, None)),
    },
    "time?": {**{f"{name}?": float for name in GROUPS}, "*": ()},
    **dict.fromkeys(("stack_time?", "memory?", "process_gib?"), _FACTORS),
    **dict.fromkeys(("time_interval?", "memory_interval?"), ([float], None)),
    "*": (),
}
_FIX = "correct or remove the file, or write it again with python -m samecurve plan --calibrate RUN ..."


def read(path: Path) -> Calibration | None:
    """Read a calibration; None if there is no file. Raises ConfigurationError for a damaged one."""
    record = read_record(path, _SCHEMA)
    if record.is_absent or record.value == {}:
        return None
    content = record.require(ConfigurationError, f"it is no calibration that this version reads; {_FIX}")
    problems = [] if content.get("kind") else ["kind: missing, expected a kind of GPU or cpu"]
    for key in ("time", "stack_time", "memory", "process_gib"):
        legal = f"expected a factor from {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}"
        factors = content.get(key, {}).items()
        problems += [
            f"{key}.{name}: found {value}, {legal}"
            for name, value in factors
            if not 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR
        ]
    for key in ("time_interval", "memory_interval"):
        interval = content.get(key)
        if interval is not None and not (len(interval) == 2 and -WIDEST <= interval[0] <= 0 <= interval[1] <= WIDEST):
            legal = f"expected [low, high] with -{WIDEST:g} <= low <= 0 <= high <= {WIDEST:g}"
            problems.append(f"{key}: found {interval}, {legal}")
    if problems:
        raise ConfigurationError("\n".join(f"{path}: {problem}; {_FIX}" for problem in problems))
    return Calibration(**content, path=str(path))
