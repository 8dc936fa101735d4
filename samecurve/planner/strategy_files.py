"""Strategy files whose sizes a plan may change: the shipped ones and those of users."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from samecurve.config.documents import KeyPath, format_problems
from samecurve.errors import ConfigurationError
from samecurve.strategy import resolve
from samecurve.strategy.pipeline_schedules import SCHEDULES
from samecurve.strategy.plan import Files

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# Order among equally fast strategies: those with fewer moving parts first.
SIMPLE_FIRST = (
    "single",
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "zero3",
    "zero3_hpz",
    "hsdp",
    "tp",
    "fsdp_tp",
    "fsdp_ulysses",
    "fsdp_cp",
    "fsdp_ep",
    "fsdp_tp_cp",
    "fsdp_ep_tp",
    "pipeline",
    "pipeline_1f1b",
    "pipeline_gpipe",
    "pipeline_interleaved",
    "pipeline_zbv",
    "pipeline_dualpipev",
    "pipeline_fsdp",
    "pp_fsdp_tp",
)
# Sizes that a strategy's files may set: which file, and the key. All other ranks form replicas or shards.
AXES: Mapping[str, tuple[str, KeyPath]] = {
    "pp": ("deepspeed", ("pipeline", "stages")),
    "dp_replicate": ("accelerate", ("parallelism_config", "parallelism_config_dp_replicate_size")),
    "cp": ("accelerate", ("parallelism_config", "parallelism_config_cp_size")),
    "tp": ("accelerate", ("parallelism_config", "parallelism_config_tp_size")),
    "ep": ("accelerate", ("parallelism_config", "parallelism_config_ep_size")),
    "hpz": ("deepspeed", ("zero_optimization", "zero_hpz_partition_size")),
    # a switch, which files with tensor parallelism may leave out
    "tp_sequence": ("accelerate", ("parallelism_config", "parallelism_config_tp_sequence_parallel")),
}
SCHEDULED = ("parallelism_config", "parallelism_config_pp_size")  # sets pp of PyTorch's schedules
ULYSSES = ("parallelism_config", "parallelism_config_sp_size")  # sets cp, too


@dataclass(frozen=True, eq=False)
class Template:
    """A strategy's files, whose parallel sizes a plan may change."""

    path: str
    files: Files

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The sizes that the files set, and `tp_sequence` beside tensor parallelism."""
        places = {axis: self.place(axis) for axis in AXES}
        found = [axis for axis, (file, key) in places.items() if getattr(self.files, file).get(*key) is not None]
        return tuple(dict.fromkeys([*found, *(["tp_sequence"] if "tp" in found else [])]))

    @property
    def own_sizes(self) -> dict[str, int]:
        """The files' own sizes of their axes."""
        return {axis: self.size(axis) for axis in self.axes}

    @property
    def is_scheduled(self) -> bool:
        """Whether the strategy is a pipeline by one of PyTorch's schedules."""
        return self.files.accelerate.get(*SCHEDULED) is not None

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that a rank holds."""
        schedule = self.files.accelerate.get("parallelism_config", "parallelism_config_pp_schedule")
        return SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1

    @property
    def by_heads(self) -> bool:
        """Whether ranks exchange sequence for heads."""
        return self.files.accelerate.get(*ULYSSES) is not None

    def place(self, axis: str) -> tuple[str, KeyPath]:
        """Return the file and the key that set the size of an axis."""
        if axis == "pp" and self.is_scheduled:
            return "accelerate", SCHEDULED
        return ("accelerate", ULYSSES) if axis == "cp" and self.by_heads else AXES[axis]

    def size(self, axis: str) -> int:
        """The files' own size of an axis; 0 where they do not say a positive whole number, False for a switch."""
        file, key = self.place(axis)
        found = getattr(self.files, file).get(*key)
        if axis == "tp_sequence":
            return found is True
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0

    def sized(self, sizes: Mapping[str, int]) -> Files:
        """Return the files with other parallel sizes."""
        # problems of one size must not add up in the files that other sizes are made from
        changed = {
            name: replace(document, content=copy.deepcopy(document.content), problems=[])
            for name, document in vars(self.files).items()
        }
        for axis, size in sizes.items():
            file, (*blocks, key) = self.place(axis)
            block = changed[file].content
            for name in blocks:
                block = block[name]
            block[key] = size
        return Files(**changed)


def read(path: str) -> Template:
    """Read a strategy's files. Raises ConfigurationError."""
    files = resolve.read_files(path)
    problems = [*files.accelerate.problems, *files.deepspeed.problems]
    if problems:
        raise ConfigurationError(format_problems(problems))
    return Template(path, files)


def shipped() -> list[Template]:
    """Read the strategies of configs/, the simplest first: what this version can run."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: (simplicity(path.stem), path.stem))
    return [read(f"configs/{path.name}") for path in paths]


def simplicity(name: str) -> int:
    """Rank of a strategy by its moving parts, 0 for the simplest."""
    return SIMPLE_FIRST.index(name) if name in SIMPLE_FIRST else len(SIMPLE_FIRST)
