"""Write the table of docs/benchmarks.md: `python -m scripts.pages.measurements`.

It says of which commit each published page is, and if what the page measures is another today. Then the tests fail
until the page is made again, or OLDER says what its numbers are of.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.markdown import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
HEADING = "## Published measurements\n"
# of digits alone only behind the word, because numbers are, too
COMMIT = re.compile(r"\b((?<=commit )|(?=[0-9]*[a-f])(?=[a-f]*[0-9]))[0-9a-f]{7,8}\b(-dirty)?")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")

_STEP = ("engines", "losses", "optim", "strategy", "training")


class Measured(NamedTuple):
    """A page and the rooms of the package whose work its numbers are; "" is the whole package."""

    path: str
    measures: str
    made_by: str
    rooms: tuple[str, ...]


MEASURED = (
    Measured(
        "benchmarks/compare.md",
        "curves of all strategies",
        "`python -m samecurve compare recipes/quickstart.yaml --num_processes 2`",
        _STEP,
    ),
    Measured(
        "docs/equal_curves.md",
        "differences of every recipe's curve under every strategy from one process",
        "`scripts/compare_recipes.py`",
        (*_STEP, "tasks"),
    ),
    Measured(
        "docs/museum.md",
        "what `prove` finds in replanted reports of wrong training",
        "`python -m tests.museum.judged`",
        ("prove",),
    ),
    Measured(
        "benchmarks/speed.md",
        "a step against `transformers.Trainer` and a bare loop on the same rows, and against TRL on a random choice of"
        " the same samples",
        "`scripts/bench_speed.py`",
        (*_STEP, "models"),
    ),
    Measured(
        "benchmarks/kernels.md",
        "`compile`, attention, chunked loss",
        "`scripts/bench_options.py kernels`",
        (*_STEP, "models"),
    ),
    Measured(
        "benchmarks/activations.md",
        "kinds of activation checkpointing",
        "`scripts/bench_options.py activations`",
        ("engines", "models"),
    ),
    Measured(
        "benchmarks/bf16.md",
        "bytes that bf16 training keeps, before and after",
        "`scripts/bench_bf16.py`",
        ("engines", "models"),
    ),
    Measured("benchmarks/sharding.md", "keys of ZeRO-3 and FSDP", "`scripts/bench_options.py sharding`", ("engines",)),
    Measured(
        "benchmarks/checkpoint.md",
        "the cost of a checkpoint",
        "`scripts/bench_checkpoint.py`",
        ("checkpoint", "storage"),
    ),
    Measured(
        "benchmarks/planner.md",
        "predictions of [`plan`](planning.md) for published runs that its constants were not fitted to",
        "`scripts/fit_planner.py benchmarks/planner/runs.csv --page`",
        ("planner",),
    ),
    Measured(
        "benchmarks/long_rows.md",
        "memory of a row of 131,072 tokens under context parallelism, and the plan's",
        "by hand",
        ("engines", "losses", "planner"),
    ),
    Measured(
        "benchmarks/long_runs.md",
        "a resume, reports and a comparison of runs of up to 10^6 steps",
        "`scripts/bench_long_runs.py`",
        ("metrics", "reports", "run"),
    ),
    Measured(
        "benchmarks/scale.md",
        "bytes of a step, a save and a resume outside the engine, by number of ranks",
        "`scripts/bench_scale.py`",
        ("checkpoint", "distributed", "training"),
    ),
    Measured(
        "benchmarks/accelerate_script.md",
        "the curve of a script for Accelerate on 1, 2 and 4 processes, with its class and with `samecurve.Accelerator`",
        "`python -m benchmarks.accelerate_script.compare`",
        ("accelerator",),
    ),
    Measured(
        "benchmarks/peers.md",
        "what `prove` finds in TRL's trainers, `transformers.Trainer` and Accelerate's own loops",
        "`python -m benchmarks.peers`",
        ("prove",),
    ),
    Measured(
        "benchmarks/public_scripts.md",
        "what `prove` finds in examples of transformers and Accelerate, unchanged",
        "`python -m benchmarks.public_scripts --accelerate CHECKOUT --transformers CHECKOUT FOLDER`",
        ("prove",),
    ),
    Measured(
        "benchmarks/trainers.md",
        "first steps of LLaMA-Factory's and TRL's configurations under their trainer and by the adopted recipe",
        "`python -m benchmarks.trainers.compare FOLDER`",
        ("config", "data", *_STEP, "tasks"),
    ),
    Measured(
        "benchmarks/strategy_files.md",
        "how many strategy files of public repositories run unchanged",
        "`python -m benchmarks.strategy_files FOLDER`",
        ("strategy", "config"),
    ),
    Measured(
        "benchmarks/reliability.md",
        "injected faults, and stock loops under the same faults",
        "`scripts/reliability.py`",
        ("checkpoint", "storage", "run", "training"),
    ),
    Measured(
        "docs/full_run.md", "the outcome of every test", "`bash scripts/test.sh --full`, `scripts/full_run.py`", ("",)
    ),
)

# Pages that are not of today's code, and what has changed since. A page that is made again goes from here.
OLDER: dict[str, str] = {
    **dict.fromkeys(
        (
            "docs/equal_curves.md",
            "benchmarks/long_rows.md",
            "benchmarks/public_scripts.md",
        ),
        "measured before the package was rebuilt; to be measured again",
    ),
    **dict.fromkeys(
        (
            "benchmarks/speed.md",
            "benchmarks/kernels.md",
            "benchmarks/activations.md",
            "benchmarks/sharding.md",
            "benchmarks/long_runs.md",
            "benchmarks/checkpoint.md",
        ),
        "measured before corrections that were not meant to change its numbers; to be measured again",
    ),
    **dict.fromkeys(
        (
            "benchmarks/scale.md",
            "benchmarks/trainers.md",
            "benchmarks/strategy_files.md",
            "benchmarks/reliability.md",
            "docs/full_run.md",
        ),
        "measured before names, links, URLs and records of others were checked more strictly; to be measured again",
    ),
}


def render_table() -> str:
    """Return a row for each page."""
    rows = []
    for page in MEASURED:
        link = page.path.removeprefix("docs/") if page.path.startswith("docs/") else f"../{page.path}"
        date, commits, same = origin((ROOT / page.path).read_text("utf-8"), page.rooms)
        state = f"{same}: {OLDER[page.path]}" if page.path in OLDER else same
        rows.append([f"[`{Path(page.path).name}`]({link})", page.measures, page.made_by, date, commits, state])
    return table(["page", "measures", "made by", "on", "at", "today's code"], rows)


def faults(pages: Sequence[Measured] = MEASURED, older: Mapping[str, str] = OLDER) -> list[str]:
    """Return what is wrong with the ages of the pages: old ones that nobody answers for, and answers without need."""
    found = []
    for page in pages:
        _, commits, same = origin((ROOT / page.path).read_text("utf-8"), page.rooms)
        rooms = ", ".join(f"samecurve/{room}".rstrip("/") for room in page.rooms)
        if same == "yes" and page.path in older:
            found.append(f"{page.path} is of today's code: take it from OLDER")
        elif same != "yes" and page.path not in older:
            found.append(
                f"{page.path} is of {commits or 'no commit'}, and {rooms} may be another since (today's code: {same}): "
                f"make it again by {page.made_by}, or say in OLDER what has changed"
            )
    return found


def origin(text: str, rooms: tuple[str, ...]) -> tuple[str, str, str]:
    """Return the newest date, the commits that a page names, and "yes" if its rooms are those of all of them."""
    commits = list(dict.fromkeys(match[0] for match in COMMIT.finditer(text)))
    several = f" and {len(commits) - 1} more" if len(commits) > 1 else ""
    if not commits or not all(_git("merge-base", "--is-ancestor", commit, "HEAD") for commit in commits):
        same = "not known"
    else:
        paths = [f"samecurve/{room}" for room in rooms]
        same = "yes" if all(_git("diff", "--quiet", commit, "--", *paths) for commit in commits) else "no"
    return max(DATE.findall(text), default=""), "".join(commits[:1]) + several, same


def _git(*words: str) -> bool:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True).returncode == 0


def with_table(page: str) -> str:
    """Return docs/benchmarks.md with its table of today."""
    before, after = page.split(HEADING)
    rest = after[after.index("\n\n", after.index("| page")) :]
    introduction = after[: after.index("| page")]
    return f"{before}{HEADING}{introduction}{render_table()}{rest}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), encoding="utf-8")
