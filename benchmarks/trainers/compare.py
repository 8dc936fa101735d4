"""Train configurations under the trainer that they are of, and by the recipes that `adopt --config` makes of them.

    python -m benchmarks.trainers.compare --trl FOLDER --llama_factory CHECKOUT --python PYTHON FOLDER > PAGE

FOLDER has TRL, and PYTHON the packages that LLaMA-Factory asks for, whose own examples are taken out of CHECKOUT. The
models have two layers and random weights, the data 8 rows, which are one step; three steps are compared, in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import commit, description
from benchmarks.markdown import table
from benchmarks.trainers.cases import CASES, NUM_ROWS, REWARD, Case, write_inputs

ROOT = Path(__file__).resolve().parents[2]
EQUAL = 1e-5
PAGE = """# Other trainers' configurations

Measured on {today} at {commit} by `{command}`: {machine}; {versions}.

{num_equal} of {num_rows}

{table}"""


class Step(NamedTuple):
    loss: float
    norm: float


def run(command: list[str], folder: Path, path: Path) -> str:
    """Returns what the command prints. Raises RuntimeError for one that fails."""
    fixed = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=folder, env=os.environ | fixed, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def train_peers(cases: dict[Path, Case], options: argparse.Namespace) -> list[str]:
    """Train all configurations of a trainer in one process. Returns the trainers with their versions."""
    versions = []
    for trainer in dict.fromkeys(case.trainer for case in cases.values()):
        folders = [str(folder) for folder, case in cases.items() if case.trainer == trainer]
        python, path = sys.executable, options.trl
        if trainer == "llama-factory":
            python, path = options.python, options.llama_factory / "src"
        printed = run([python, str(ROOT / "benchmarks" / "trainers" / "peer.py"), trainer, *folders], ROOT, path)
        (options.folder / f"{trainer}.log").write_text(printed)
        versions += [line for line in printed.splitlines() if line.startswith(("LLaMA-Factory ", "TRL "))][:1]
    return list(dict.fromkeys(versions))


def of_peer(folder: Path) -> list[Step]:
    logs = [json.loads(path.read_text())["log_history"] for path in folder.glob("peer/**/trainer_state.json")]
    return [Step(line["loss"], line["grad_norm"]) for line in max(logs, key=len, default=[]) if "loss" in line]


def of_recipe(case: Case, folder: Path) -> tuple[list[Step], int, list[str]]:
    """Returns the steps, the trained tokens of one, and what adopt says has no equal."""
    adopt = [sys.executable, "-m", "samecurve", "adopt", "--config", "config.yaml", "--output", "recipe.yaml"]
    printed = run([*adopt, *([] if case.example else ["--trainer", "trl", "--method", case.trainer])], folder, ROOT)
    changes = ["output_dir=run", "logging.trackers=[]", "export.enabled=false"]
    changes += ["adapter.path=adapter"] if (folder / "adapter").is_dir() else []
    changes += ["model.path=scores"] if case.example == REWARD else []
    changes += ["tokenizer.chat_template=marked.jinja"] if case.marked else []
    run([sys.executable, str(ROOT / "train.py"), "recipe.yaml", *changes], folder, ROOT)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "grad_norm" in line]
    named = [line.partition("differs: ")[2] for line in printed.splitlines() if line.startswith("NO EQUAL")]
    return [Step(line["loss"], line["grad_norm"]) for line in lines], lines[0]["tokens"], named


def row_of(case: Case, folder: Path) -> list[str]:
    """A line of the table; the last cell says how far apart the curves are."""
    recipe, tokens, named = of_recipe(case, folder)
    peer = of_peer(folder)
    factor = (tokens + NUM_ROWS) / tokens if case.counts_first else 1.0
    pairs = list(zip(peer, recipe, strict=False))
    print(case.name, peer, recipe, named, sep="\n    ", file=sys.stderr, flush=True)
    if not pairs or len(peer) != len(recipe):
        return [case.name, "", "", "", "", f"{len(peer)} steps, the recipe's {len(recipe)}", ""]
    apart = max(abs(a * factor / b - 1) for steps in pairs for a, b in zip(*steps, strict=True))
    notes = ["line break marked"] if case.marked else []
    notes += [f"x {tokens + NUM_ROWS}/{tokens}"] if case.counts_first else []
    verdict = "equal" if apart < EQUAL else "**differs**"
    return [
        case.name,
        *(f"{n:.6f}" for n in (*peer[0], *recipe[0])),
        f"{verdict}, {apart:.0e}",
        "; ".join([*notes, *named]),
    ]


def page(versions: list[str], rows: list[list[str]]) -> str:
    columns = ["configuration", "its first loss", "and norm", "the recipe's", "and norm", "3 steps", "besides"]
    return PAGE.format(
        today=date.today(),
        command="python -m benchmarks.trainers.compare",
        machine=description(),
        commit=commit("benchmarks/trainers.md"),
        versions="; ".join(versions),
        num_equal=sum(row[5].startswith("equal") for row in rows),
        num_rows=len(rows),
        table=table(columns, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models, rows and runs")
    parser.add_argument("--trl", type=Path, help="a folder that TRL is installed in")
    parser.add_argument("--llama_factory", type=Path, help="a checkout")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of LLaMA-Factory")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    options = parser.parse_args()
    cases = {}
    for number, case in enumerate(CASES):
        if options.only in case.name and (options.llama_factory if case.example else options.trl):
            cases[options.folder.absolute() / str(number)] = case
    for folder, case in cases.items():
        folder.mkdir(parents=True)
        write_inputs(case, folder, options.llama_factory and options.llama_factory / "examples")
    versions = train_peers(cases, options)
    print(page(versions, [row_of(case, folder) for folder, case in cases.items()]))


if __name__ == "__main__":
    main()
