"""Reads a table of runs (runs.csv) into jobs. Measured columns are never read."""

from __future__ import annotations

import csv
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.planner.hardware import gpu
from samecurve.planner.job import Job, StateBytes
from samecurve.planner.layout import Layout
from samecurve.planner.shape import ModelShape

NEEDED = (
    "id stack layers hidden heads kv_heads ffn mlp vocab tied experts top_k gpu gpu_memory_gib gpus_per_node "
    "inter_node_gbit gpus dp tp pp cp ep virtual_stages schedule zero shard sequence_parallel micro_batch grad_accum "
    "global_batch seq precision weight_bytes grad_bytes accum_bytes master_bytes optim_bytes flash compile async_tp "
    "fp8_recipe chunked_loss packed_experts activation_checkpointing memory_kind"
).split()
UNUSED = (
    "source url model params_b step_s tokens_per_s_per_gpu mfu_pct_published memory_gib status oom_evidence time_ok "
    "memory_ok quality note"
).split()


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows, in any order of columns. Raises ConfigurationError for an unknown or a missing column."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, restval="")
            rows, names = list(table), list(table.fieldnames or [])
    except OSError as error:
        raise ConfigurationError(f"--runs {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"--runs {path}: not a CSV file in UTF-8: {error}") from None
    problems = [f"{path}: column {name!r} is missing" for name in NEEDED if name not in names]
    problems += [f"{path}: unknown column {name!r}" for name in names if name not in (*NEEDED, *UNUSED)]
    if problems:
        raise ConfigurationError("\n".join(problems))
    return rows


def job(row: dict[str, str]) -> Job:
    """Turn a row into a job. Raises ValueError, which names the column, for a cell that is no number or is missing."""

    def number(name: str, default: float = 0) -> float:
        text = row[name].strip()
        try:
            return float(text) if text else default
        except ValueError:
            raise ValueError(f"column {name}: {text!r} is not a number") from None

    def count(name: str, default: int = 1) -> int:
        return int(number(name, default)) or default

    def size(name: str) -> int:
        if number(name) < 1:
            raise ValueError(f"column {name}: found {row[name].strip()!r}, expected a positive number")
        return int(number(name))

    def flag(name: str) -> bool:
        return bool(number(name))

    heads, gated = size("heads"), row["mlp"].strip() != "gelu"
    shape = ModelShape(
        size("layers"), size("hidden"), heads, count("kv_heads", heads), size("ffn"), size("vocab"), gated,
        flag("tied"), int(number("experts")), int(number("top_k")), 0 if gated else size("seq"),
    )  # fmt: skip
    names = ("dp", "tp", "pp", "cp", "ep", "virtual_stages")
    layout = Layout(
        **{name: count(name) for name in names}, schedule=row["schedule"].strip(), zero=int(number("zero")),
        shard=count("shard", count("dp") if number("zero") else 1), sequence_parallel=flag("sequence_parallel"),
        exchange="ring",
    )  # fmt: skip
    states = StateBytes(*(number(f"{name}_bytes") for name in ("weight", "grad", "accum", "master", "optim")))
    kind = row["gpu"].strip()
    if not kind:
        raise ValueError("column gpu: missing; give a kind such as H100-80GB")
    return Job(
        shape, layout, gpu(kind), size("micro_batch"), size("seq"), count("grad_accum"), states, kind,
        number("gpu_memory_gib"), count("gpus_per_node", 8), number("inter_node_gbit"), row["precision"].strip(),
        row["fp8_recipe"].strip(), flag("flash"), flag("compile"), flag("async_tp"), flag("chunked_loss"),
        row["activation_checkpointing"].strip() or "none", row["stack"].strip(), row["memory_kind"].strip(),
    )  # fmt: skip
