"""How fast a step is, beside others' steps on the same rows: transformers.Trainer, TRL and loops without a framework.

    python scripts/bench_speed.py [--rounds 3] [--only pretrain sft own dropout ranks start]
        [--output benchmarks/speed.md] [-- KEY=VALUE ...]

Contestants take turns, each in processes of its own, on two cores of this machine's CPU. Each machine's tables are kept
in results.json (beside the page, in a folder of the page's name), so --only leaves the others as they are. TRL takes
part where SAMECURVE_TRL names a folder that it is installed in (scripts/test.sh --full makes .venv/trl). What stands
behind -- overrides every contestant's recipe.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import commit  # noqa: E402
from benchmarks.speed.page import WARM_UP, Found, Measurement, page  # noqa: E402
from samecurve.config.inheritance import latest_overrides  # noqa: E402
from samecurve.distributed.affinity import num_cores  # noqa: E402
from samecurve.specs.environment import processor, versions  # noqa: E402
from samecurve.storage.atomic import write_json, write_text  # noqa: E402
from samecurve.storage.records import read_record  # noqa: E402

FOLDER = ROOT / "benchmarks" / "speed"
CORES = 2
TRL = os.environ.get("SAMECURVE_TRL", "")


@dataclass(frozen=True)
class Contestant:
    """program: a file beside the recipes; "" is train.py. strategy: of configs/, with two processes of one thread."""

    name: str
    program: str = ""
    arguments: tuple[str, ...] = ()
    strategy: str = ""


@dataclass(frozen=True)
class Match:
    """The ratios are to the first contestant's tokens/s. goal: a sentence of the page."""

    title: str
    recipe: str
    contestants: tuple[Contestant, ...]
    goal: str


FIRST_STEP = "recipes/quickstart.yaml", "steps=1", "schedule.warmup_steps=0"
# What is asked, how it ends, of train.py with which arguments. In each round nothing is cached before the first one.
STARTS = {
    "`train.py --help`": (0, ("--help",)),
    "a mistake in a recipe is reported": (2, ("recipes/quickstart.yaml", "steps=none")),
    "the quickstart's first step is done, with a tokenizer to train and texts to tokenise": (0, FIRST_STEP),
    "the same again": (0, FIRST_STEP),
}
START_TITLE = "Starting"
START_GOAL = "The goals: 0.5 s, 2 s, 10 s and 4 s."
REGIONAL = ("compile=regional",)
DROPOUT = ("model.config.attention_dropout=0.1",)
MATCHES = {
    "pretrain": Match(
        "Packed pretraining against transformers.Trainer",
        "pretrain.yaml",
        (
            Contestant("samecurve, compile=regional", "", REGIONAL),
            Contestant("samecurve"),
            Contestant("Trainer", "trainer_loop.py"),
            Contestant("Trainer, torch_compile", "trainer_loop.py", ("--compile",)),
            Contestant("bare loop", "bare_loop.py"),
            Contestant("bare loop, compiled", "bare_loop.py", ("--compile",)),
        ),
        "The goal: 1.5 times the compiled Trainer, which would have 0.67 of it, at an `mfu` of 45 %.",
    ),
    "sft": Match(
        "Fine-tuning on samples of different lengths against TRL",
        "sft.yaml",
        (
            Contestant("samecurve, compile=regional", "", REGIONAL),
            Contestant("samecurve"),
            Contestant("TRL, padded", "trl_loop.py"),
            Contestant("TRL, packed", "trl_loop.py", ("--packing",)),
            Contestant("TRL, packed, torch_compile", "trl_loop.py", ("--packing", "--compile")),
        ),
        "The goal: 4 times TRL, which would have 0.25 of it.",
    ),
    "own": Match(
        "What the framework itself costs",
        "pretrain.yaml",
        (Contestant("samecurve"), Contestant("the same step in a bare loop", "bare_loop.py", ("--chunked",))),
        "The goal: the bare loop has at most 1.02 of it.",
    ),
    "dropout": Match(
        "Dropout with the same masks under every strategy",
        "pretrain.yaml",
        (
            Contestant("samecurve, attention_dropout=0.1", "", DROPOUT),
            Contestant("the same step in a bare loop, torch's masks", "bare_loop.py", ("--chunked", *DROPOUT)),
            Contestant("samecurve, no dropout"),
        ),
        "The goal: the bare loop has at most 1.03 of it. Attention that drops values is not fused on a CPU, whose masks"
        " ever they are: the rest of the distance to no dropout.",
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


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    pin()
    results = arguments.output.with_suffix("") / "results.json"
    found, device = kept(results), processor()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            if name == "sft" and not TRL:
                print(f"{MATCHES[name].title}: SAMECURVE_TRL names no folder with TRL; the table stays as it is")
                continue
            around = circumstances(name)
            if name == "start":
                measured = starts(arguments.rounds, Path(folder))
            else:
                measured = compared(play(MATCHES[name], arguments.rounds, Path(folder), arguments.overrides))
                measured["overrides"] = arguments.overrides
            found.setdefault(name, {})[device] = Measurement(**measured, **around, rounds=arguments.rounds)
            results.parent.mkdir(parents=True, exist_ok=True)
            write_json(results, {each: by_device(asdict, of) for each, of in found.items()})
            write_text(arguments.output, shown(found))
    own = {name: {device: of[device]} for name, of in found.items() if name in arguments.only and device in of}
    print(shown(own))


def kept(results: Path) -> Found:
    content = read_record(results).value or {}
    return {name: by_device(lambda each: Measurement(**each), of) for name, of in content.items()}


def by_device(change: Callable, measured: Mapping) -> dict:
    return {device: change(each) for device, each in measured.items()}


def pin() -> None:
    """This process and those that it starts."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*MATCHES, "start"), default=[*MATCHES, "start"])
    parser.add_argument("--output", type=Path, default=FOLDER.with_suffix(".md"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every contestant's recipe")
    return parser


def shown(found: Found) -> str:
    titles = {name: match.title for name, match in MATCHES.items()} | {"start": START_TITLE}
    goals = {name: match.goal for name, match in MATCHES.items()} | {"start": START_GOAL}
    return page(found, titles, goals)


def play(match: Match, rounds: int, folder: Path, overrides: Sequence[str] = ()) -> dict[str, list[Run]]:
    """The run of each round, by the contestant's name."""
    found: dict[str, list[Run]] = {}
    for number in range(1, rounds + 1):
        for contestant in match.contestants:
            print(f"{match.title}: round {number} of {rounds}, {contestant.name}", flush=True)
            found.setdefault(contestant.name, []).append(run(contestant, FOLDER / match.recipe, folder, overrides))
    return found


@dataclass(frozen=True)
class Run:
    """steps: loss, tokens and step_seconds of each, and samecurve's mfu. peak_tflops: what that is against.

    peak_gib: the most memory that one of its processes had in use.
    """

    steps: list[dict]
    peak_tflops: float | None = None
    peak_gib: float = 0.0

    @property
    def speed(self) -> float:
        """Trained tokens per second of the median steady step: a busy neighbour makes some of them twice as long."""
        return median(step["tokens"] / step["step_seconds"] for step in self.steady)

    @property
    def steady(self) -> list[dict]:
        return self.steps[WARM_UP:]


def run(contestant: Contestant, recipe: Path, folder: Path, overrides: Sequence[str]) -> Run:
    """Raises CalledProcessError, after printing what the contestant said."""
    output = Path(tempfile.mkdtemp(dir=folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if contestant.strategy else "2", "HF_HUB_OFFLINE": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # a GPU's page is scripts/bench_gpu.sh's
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), TRL])
    if contestant.program:
        program = [sys.executable, str(FOLDER / contestant.program), str(recipe), str(output / "steps.json")]
        command = [*program, *contestant.arguments, *overrides]
    else:
        launcher = [sys.executable]
        if contestant.strategy:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        strategy = ["--strategy", f"configs/{contestant.strategy}.yaml"] if contestant.strategy else []
        keys = latest_overrides([*contestant.arguments, *overrides, f"output_dir={output}/run"])
        command = [*launcher, "train.py", str(recipe), *strategy, *keys]
    with (output / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print((output / "log").read_text()[-6000:])
        raise subprocess.CalledProcessError(process.returncode, command)
    peak_gib = used.ru_maxrss / 2**20  # Linux gives KiB
    if contestant.program:
        return Run(json.loads((output / "steps.json").read_text()), None, peak_gib)
    steps = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    flops = json.loads((output / "run" / "run.json").read_text())["flops"]
    return Run(steps, flops["peak_tflops"], peak_gib)


def compared(found: dict[str, list[Run]]) -> dict:
    """Fields of a Measurement. The first contestant is what the others are compared with."""
    first = next(iter(found.values()))
    rows = []
    for name, runs in found.items():
        ratios = [each.speed / reference.speed for each, reference in zip(runs, first, strict=True)]
        rate, loss = median(each.speed for each in runs), runs[-1].steps[-1]["loss"]
        peak_gib = max(each.peak_gib for each in runs)
        rows.append([name, rate, median(ratios), min(ratios), max(ratios), loss, peak_gib])
    mfu = median(step["mfu"] for each in first for step in each.steady)
    return {"rows": rows, "mfu": mfu, "peak_tflops": median(each.peak_tflops for each in first)}


def starts(rounds: int, folder: Path) -> dict:
    """Fields of a Measurement: seconds until a command has answered, or a small model has made its first step."""
    seconds: dict[str, list[float]] = {name: [] for name in STARTS}
    for number in range(rounds):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["SAMECURVE_CACHE"] = str(folder / f"cache_{number}")
        for index, (name, (code, arguments)) in enumerate(STARTS.items()):
            print(f"{START_TITLE}: round {number + 1} of {rounds}, {name}", flush=True)
            command = [sys.executable, "train.py", *arguments, f"output_dir={folder}/start_{index}_{number}"]
            began = time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            whole = time.perf_counter() - began
            if done.returncode != code:
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
            step = re.search(r"first step done ([\d.]+) s after", done.stdout)
            seconds[name].append(float(step[1]) if step else whole)
    return {"rows": [[name, median(each), None, min(each), max(each), None, None] for name, each in seconds.items()]}


def circumstances(name: str) -> dict:
    """Fields of a Measurement: when, at which commit and with what this table is measured."""
    trl = {each.metadata["Name"]: each.version for each in metadata.distributions(name="trl", path=[TRL])}
    return {
        "date": str(date.today()),
        "commit": commit("benchmarks/speed.md", "benchmarks/speed/results.json"),
        "cores": min(CORES, num_cores()),
        "versions": versions() | (trl if name == "sft" else {}),
    }


if __name__ == "__main__":
    main()
