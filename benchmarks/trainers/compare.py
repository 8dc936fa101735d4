"""Train configurations under the trainer that they are of, and by the recipes that `adopt --config` makes of them.

    python -m benchmarks.trainers.compare --trl FOLDER --llama_factory CHECKOUT --python PYTHON FOLDER

FOLDER has TRL, and PYTHON the packages that LLaMA-Factory asks for, whose own examples are taken out of CHECKOUT. The
models have two layers and random weights, the data 8 rows, which are one step; three steps are compared, in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
PAGE = """# Configurations of other trainers

Measured on {today} by `python -m benchmarks.trainers.compare` at {commit}: {machine}.
The trainers: {versions}.

A YAML is trained by its trainer's own command, and by the recipe that `adopt --config` makes of it: three steps of 8
rows in fp32, in one CPU process. The model is a Llama of 2 layers with random weights, and both start from one adapter.
LLaMA-Factory's configurations are files of its `examples/`. The changes of their keys stand beside the names, except
for model, data, the small batches and `bf16: false`.

**{num_equal} of {num_rows} are equal**: loss and gradient norm of the first step differ by less than 1e-5, {num_ratios}
of them times a ratio that is known. The last column but one has the largest difference in three steps.

{table}

- **Marks**: LLaMA-Factory trains the line break that ChatML writes behind the end of an answer. A recipe does so with a
  `tokenizer.chat_template` whose `{{% generation %}}` marks include the line break, which these have.
- **Ratios**: where the first token of a row has a label, the mean of LLaMA-Factory's transformers counts it, although
  nothing predicts it ([PR 46204](https://github.com/huggingface/transformers/pull/46204) ends that). Its loss and norm
  are compared times this ratio of tokens.
- **IPO**: LLaMA-Factory calls TRL 0.24's `dpo_loss` without `pref_loss`, so it trains the sigmoid loss.
- **KTO**: its KL is that of a micro-batch, here that of a step; with one micro-batch they are the same.
- **Packing** without `neat_packing` lets the documents of a row attend to each other there, never here.
"""


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


def train_peers(cases: dict[Path, Case], options: argparse.Namespace) -> None:
    """Train all configurations of a trainer in one process, whose output is beside their folders."""
    for trainer in dict.fromkeys(case.trainer for case in cases.values()):
        folders = [str(folder) for folder, case in cases.items() if case.trainer == trainer]
        python, path = sys.executable, options.trl
        if trainer == "llama-factory":
            python, path = options.python, options.llama_factory / "src"
        printed = run([python, str(ROOT / "benchmarks" / "trainers" / "peer.py"), trainer, *folders], ROOT, path)
        (options.folder / f"{trainer}.log").write_text(printed)


def versions(folder: Path) -> str:
    """What the trainers said of themselves."""
    lines = [line for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line.startswith(("LLaMA-Factory ", "TRL "))))


def of_peer(folder: Path) -> list[Step]:
    logs = [json.loads(path.read_text())["log_history"] for path in folder.glob("peer/**/trainer_state.json")]
    return [Step(line["loss"], line["grad_norm"]) for line in max(logs, key=len, default=[]) if "loss" in line]


def of_recipe(case: Case, folder: Path) -> tuple[list[Step], int, list[str]]:
    """Returns the steps, the trained tokens of one, and what adopt says has no equal."""
    adopt = [sys.executable, "-m", "samecurve", "adopt", "--config", "config.yaml", "--output", "recipe.yaml"]
    printed = run([*adopt, *([] if case.example else ["--trainer", "trl", "--method", case.trainer])], folder, ROOT)
    changes = ["output_dir=run", "logging.trackers=[]", "export.enabled=false"]
    if case.example == REWARD:
        changes += ["model.path=scores", "adapter.path=adapter_of_scores"]
    elif (folder / "adapter").is_dir():
        changes += ["adapter.path=adapter"]
    changes += ["tokenizer.chat_template=marked.jinja"] if case.marked else []
    run([sys.executable, str(ROOT / "train.py"), "recipe.yaml", *changes], folder, ROOT)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "grad_norm" in line]
    named = [line.partition("differs: ")[2] for line in printed.splitlines() if line.startswith("NO EQUAL")]
    return [Step(line["loss"], line["grad_norm"]) for line in lines], lines[0]["tokens"], named


def apart(peer: Step, recipe: Step, factor: float) -> float:
    return max(abs(theirs * factor / ours - 1) for theirs, ours in zip(peer, recipe, strict=True))


def row_of(case: Case, folder: Path) -> list[str]:
    """A line of the table. Raises RuntimeError where either did not train all steps."""
    kept = folder / "row.json"
    if kept.exists():
        return json.loads(kept.read_text())
    recipe, tokens, named = of_recipe(case, folder)
    peer = of_peer(folder)
    print(case.name, peer, recipe, named, sep="\n    ", file=sys.stderr, flush=True)
    if len(peer) != len(recipe) or not peer:
        raise RuntimeError(f"{case.name}: {len(peer)} steps there, {len(recipe)} here")
    factor = (tokens + NUM_ROWS) / tokens if case.counts_first else 1.0
    first, *more = (apart(*steps, factor) for steps in zip(peer, recipe, strict=True))
    notes = ["marks"] if case.marked else []
    notes += [f"x {tokens + NUM_ROWS}/{tokens}"] if case.counts_first else []
    notes += [f"adopt: no equal of {line.partition(';')[0]}" for line in named]
    numbers = [f"{number:.6f}" for number in (*peer[0], *recipe[0])]
    verdict = "equal" if first < EQUAL else "differs"
    row = [case.name, *numbers, verdict, f"{max(first, *more):.0e}", "; ".join(notes)]
    kept.write_text(json.dumps(row))
    return row


def is_equal_by_ratio(row: list[str]) -> bool:
    return "equal" in row and any(note.startswith("x ") for note in row[-1].split("; "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models, rows and runs; an earlier call's is completed")
    parser.add_argument("--trl", type=Path, help="a folder that TRL is installed in")
    parser.add_argument("--llama_factory", type=Path, help="a checkout")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of LLaMA-Factory")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "trainers.md", help="default: %(default)s")
    options = parser.parse_args()
    cases = {}
    for number, case in enumerate(CASES):
        if options.only in case.name and (options.llama_factory if case.example else options.trl):
            cases[options.folder.absolute() / str(number)] = case
    new = {folder: case for folder, case in cases.items() if not (folder / "row.json").exists()}
    for folder, case in new.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_inputs(case, folder, options.llama_factory and options.llama_factory / "examples")
    train_peers(new, options)
    rows = [row_of(case, folder) for folder, case in cases.items()]
    columns = ["configuration", "its first loss", "norm", "the recipe's", "norm", "first step", "3 steps", "besides"]
    facts = {"today": date.today(), "commit": commit("benchmarks/trainers.md"), "machine": description()}
    facts |= {"versions": versions(options.folder), "num_rows": len(rows), "table": table(columns, rows)}
    facts |= {
        "num_equal": sum("equal" in row for row in rows),
        "num_ratios": sum(map(is_equal_by_ratio, rows)),
    }
    options.output.write_text(PAGE.format(**facts), encoding="utf-8")  # libraries print here, too


if __name__ == "__main__":
    main()
