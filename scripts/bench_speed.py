"""How fast a step is, beside others' steps on the same rows: transformers.Trainer, TRL and loops without a framework.

    python scripts/bench_speed.py [--rounds 3] [--only pretrain sft own ranks start] [--output benchmarks/speed.md]

Contestants take turns, each in processes of its own, on two cores of this machine's CPU. A ratio is that of tokens per
second in the same round; the table has its median. TRL takes part where SAMECURVE_TRL names a folder that it is
installed in (scripts/test.sh --full makes .venv/trl).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import markdown  # noqa: E402

FOLDER = ROOT / "benchmarks" / "speed"
CORES = 2
WARM_UP = 6
"""Steps that are not counted: compilation, and what is allocated once."""


@dataclass(frozen=True)
class Contestant:
    """program: a file beside the recipes; "" is train.py. strategy: of configs/, with two processes of one thread."""

    name: str
    program: str = ""
    arguments: tuple[str, ...] = ()
    strategy: str = ""


@dataclass(frozen=True)
class Match:
    """The ratios are to the first contestant's tokens/s. goal: a sentence."""

    title: str
    recipe: str
    contestants: tuple[Contestant, ...]
    goal: str


# What is asked, how it ends, of train.py with which arguments.
STARTS = {
    "`train.py --help`": (0, ("--help",)),
    "a mistake in a recipe is told": (2, ("recipes/quickstart.yaml", "steps=none")),
    "the quickstart's first step is done": (0, ("recipes/quickstart.yaml", "steps=1", "schedule.warmup_steps=0")),
}
REGIONAL = ("compile=regional",)
MATCHES = {
    "pretrain": Match(
        "Packed pretraining against transformers.Trainer",
        "pretrain.yaml",
        (
            Contestant("samecurve", "", REGIONAL),
            Contestant("samecurve, not compiled"),
            Contestant("Trainer", "trainer_loop.py"),
            Contestant("Trainer, torch_compile", "trainer_loop.py", ("--compile",)),
            Contestant("bare loop", "bare_loop.py"),
            Contestant("bare loop, compiled", "bare_loop.py", ("--compile",)),
        ),
        "The goal: 1.5 times the compiled Trainer, which would have 0.67 of it, at an `mfu` of 55 %.",
    ),
    "sft": Match(
        "Fine-tuning on samples of different lengths against TRL",
        "sft.yaml",
        (
            Contestant("samecurve", "", REGIONAL),
            Contestant("TRL, padded", "trl_loop.py"),
            Contestant("TRL, packed", "trl_loop.py", ("--packing",)),
        ),
        "The goal: 4 times TRL, which would have 0.25 of it.",
    ),
    "own": Match(
        "What the framework itself costs",
        "pretrain.yaml",
        (Contestant("samecurve"), Contestant("the same step in a bare loop", "bare_loop.py", ("--chunked",))),
        "The goal: the bare loop has at most 1.02 of it.",
    ),
    "ranks": Match(
        "Two processes of one thread against one process of two",
        "pretrain.yaml",
        (
            Contestant("one process", "", ("batch.micro_batch_size=4",)),
            *(
                Contestant(name, "", ("batch.micro_batch_size=4",), name)
                for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")
            ),
        ),
        "The goal: DDP has 0.95 of one process.",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*MATCHES, "start"), default=[*MATCHES, "start"])
    parser.add_argument("--output", type=Path, default=FOLDER.with_suffix(".md"))
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            if name == "start":
                parts += [starts(arguments.rounds, Path(folder))]
            else:
                parts += [table(MATCHES[name], play(MATCHES[name], arguments.rounds, Path(folder)))]
            print(parts[-1])
    text = "\n\n".join(part.strip() for part in [heading(), *parts])
    arguments.output.write_text(text + "\n", encoding="utf-8")


def play(match: Match, rounds: int, folder: Path) -> dict[str, list[list[dict]]]:
    """The steps of each round, by the contestant's name."""
    found: dict[str, list[list[dict]]] = {}
    for number in range(1, rounds + 1):
        for contestant in match.contestants:
            if contestant.program == "trl_loop.py" and not os.environ.get("SAMECURVE_TRL"):
                continue
            print(f"{match.title}: round {number} of {rounds}, {contestant.name}", flush=True)
            found.setdefault(contestant.name, []).append(run(contestant, FOLDER / match.recipe, folder))
    return found


def run(contestant: Contestant, recipe: Path, folder: Path) -> list[dict]:
    """One contestant's steps: {loss, tokens, step_seconds}. Raises CalledProcessError, after printing what it said."""
    output = Path(tempfile.mkdtemp(dir=folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if contestant.strategy else "2", "HF_HUB_OFFLINE": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # a GPU's page is scripts/bench_gpu.sh's
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("SAMECURVE_TRL", "")])
    if contestant.program:
        program = [sys.executable, str(FOLDER / contestant.program), str(recipe), str(output / "steps.json")]
        command = [*program, *contestant.arguments]
    else:
        launcher = [sys.executable]
        if contestant.strategy:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        strategy = ["--strategy", f"configs/{contestant.strategy}.yaml"] if contestant.strategy else []
        command = [*launcher, "train.py", str(recipe), *strategy, *contestant.arguments, f"output_dir={output}/run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    done.check_returncode()
    if contestant.program:
        return json.loads((output / "steps.json").read_text())
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


def speed(steps: list[dict]) -> float:
    """Trained tokens per second of the steady steps."""
    steady = steps[WARM_UP:]
    return sum(step["tokens"] for step in steady) / sum(step["step_seconds"] for step in steady)


def table(match: Match, found: dict[str, list[list[dict]]]) -> str:
    first = found[match.contestants[0].name]
    rows = []
    for name, rounds in found.items():
        ratios = [speed(steps) / speed(reference) for steps, reference in zip(rounds, first, strict=True)]
        rate, loss = median(map(speed, rounds)), rounds[-1][-1]["loss"]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{rate:,.0f}", f"{median(ratios):.2f}", spread, f"{loss:.4f}"])
    columns = "", "trained tokens/s", "against the first", "lowest and highest", "loss"
    peak = median(step["mfu"] for steps in first for step in steps[WARM_UP:])
    text = f"{len(first)} rounds on {date.today()}. The first one's `mfu` is {peak:.0%}. {match.goal}"
    return f"\n## {match.title}\n\n{markdown.table(columns, rows)}\n\n{text}\n"


def starts(rounds: int, folder: Path) -> str:
    """Seconds until a command has answered, and until a small model has made its first step."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    rows = []
    for name, (code, arguments) in STARTS.items():
        seconds = []
        for number in range(rounds):
            print(f"Starting: round {number + 1} of {rounds}, {name}", flush=True)
            command = [sys.executable, "train.py", *arguments, f"output_dir={folder}/start_{len(rows)}_{number}"]
            began = time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            whole = time.perf_counter() - began
            if done.returncode != code:
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
            step = re.search(r"first step done ([\d.]+) s after", done.stdout)
            seconds.append(float(step[1]) if step else whole)
        rows.append([name, f"{median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}"])
    return f"\n## Starting\n\n{markdown.table(('', 'seconds', 'lowest and highest'), rows)}\n"


def heading() -> str:
    import torch

    from samecurve.benchmarks.timing import environment
    from samecurve.flops import probe

    facts, peak = environment(torch.device("cpu")), probe(torch.device("cpu"), torch.bfloat16, seconds=3.0)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return f"""# Speed on a CPU, side by side

Measured on {date.today()} by `python scripts/bench_speed.py`: {CORES} cores ({facts["device"]}), no GPU;
{versions}.

A Llama of 13.8 million parameters, bf16, 8 rows of 512 tokens per step (benchmarks/speed/). The contestants take turns;
the first {WARM_UP} steps of each are not counted. `mfu` is by the convention 6 N + 12 L h s (attention over the full
square); every run measures the peak, matrix multiplication alone, for itself ({peak:.2f} TFLOP/s now).
samecurve, and the bare loop that shows its own cost, take the attention that samecurve chooses (varlen), the others
that of transformers (sdpa). The loss is that of the last step: equal rows in equal order, except TRL's, which packs and
orders samples itself. Trainer's learning rate lags a step behind, from 0 on, so its loss does too. TRL has its defaults
for packing; padded, its steps have as many samples as samecurve's rows.
"""


if __name__ == "__main__":
    main()
