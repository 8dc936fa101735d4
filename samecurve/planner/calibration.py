"""Lessons of finished runs about a machine: factors of the predicted parts of a step, and slack of the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import read_json, write_json
from samecurve.storage.cache import cache_folder

COMMUNICATION = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends", "data_parallel", "offload")
GROUPS: tuple[str, ...] = ("compute", "communication", "host")


def group(part: str) -> str:
    """Name the factor of a part of the step: an efficiency, a bandwidth or the host's floor."""
    return "communication" if part in COMMUNICATION else "host" if part == "host" else "compute"


@dataclass(frozen=True)
class Calibration:
    """Corrections for one kind of hardware, learnt from runs.

    Attributes:
        kind: the GPU's kind, or cpu.
        origin: what the runs ran on: `processor` (of a CPU), `device`, `versions`, `date` and the `runs`' folders.
        time: factor by group of the parts of a step.
        stack_time: factor of the whole step by Job.library; empty where the runs are all of one.
        memory: measured over predicted tensors by library, "" for the others.
        process_gib: resident memory beside the tensors by library, "" for the others; empty on a GPU.
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

    def process(self, library: str) -> float | None:
        return self.process_gib.get(library, self.process_gib.get(""))

    def describe(self) -> str:
        """Say in a few words what the constants come from."""
        counts = {"run": len(self.origin.get("runs", ())), "result of bench": len(self.origin.get("bench", ()))}
        plural = {"run": "runs", "result of bench": "results of bench"}
        named = [f"{count} {name if count == 1 else plural[name]}" for name, count in counts.items() if count]
        return f"calibrated on {' and '.join(named)}, {str(self.origin.get('date', ''))[:10]}: {self.path}"

    def warnings(self, kind: str, processor: str, versions: Mapping[str, str | None]) -> list[str]:
        """List how the machine and the libraries that are planned for differ from those of the runs."""
        found = []
        if kind != self.kind:
            found.append(f"measured on {self.kind}, planned for {kind}")
        elif kind == "cpu" and self.origin.get("processor", processor) != processor:
            found.append(f"measured on {self.origin['processor']}, this is {processor}")
        measured = self.origin.get("versions", {})
        for name in ("torch", "deepspeed", "accelerate"):
            if name in measured and measured[name] != versions.get(name):
                found.append(f"measured with {name} {measured[name]}, here is {versions.get(name) or 'none'}")
        return found


def default_path(kind: str) -> Path:
    """Return the file that later plans and runs of this kind of hardware read."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in kind)
    return cache_folder(None) / "planner" / f"{safe}.json"


def write(found: Calibration, path: Path) -> None:
    """Write the calibration. Raises StorageError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {key: value for key, value in asdict(found).items() if key != "path"})


def read(path: Path) -> Calibration | None:
    """Read a calibration; None if there is no file. Raises ConfigurationError for a damaged one."""
    try:
        content = read_json(path)
        if not content:
            return None
        found = Calibration(**content, path=str(path))
        numbers = [*found.time.values(), *found.stack_time.values(), *found.memory.values()]
        if not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in numbers):
            raise ValueError("a factor is not a positive number")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # TypeError: keys of another version; AttributeError: a value in the place of a block
        raise ConfigurationError(
            f"{path}: no calibration that this version reads ({error}); remove the file, or write it again with "
            "python -m samecurve plan --calibrate RUN ..."
        ) from None
    return found
