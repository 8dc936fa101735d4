"""What the runner has to know about each loop: how it is started, and where its checkpoints, files and losses are."""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import toy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Loop:
    """script: of this folder. checkpoints: the folder of checkpoints, in the run's folder; pattern: their names.

    The others are files of a checkpoint. optimizer: the one with the moments, of the last rank where each has its own.
    position: where the loop reads how far it was. generators: the states of the random generators.
    """

    name: str
    script: str
    pattern: str
    weights: str
    optimizer: str
    position: str
    generators: str
    checkpoints: str = "checkpoints"

    def command(self, directory: Path, work: Path, world: int) -> list[str]:
        return [*_torchrun(world), str(HERE / self.script), str(directory)]

    def folders(self, directory: Path) -> list[Path]:
        """Whatever lies where the checkpoints are, also half-written and half-removed ones."""
        where = directory / self.checkpoints
        return sorted(folder for folder in where.iterdir() if folder.is_dir()) if where.exists() else []

    def found(self, directory: Path) -> list[Path]:
        """The checkpoints' folders by their names, oldest first."""
        return sorted((folder for folder in self.folders(directory) if folder.match(self.pattern)), key=_number)

    def losses(self, directory: Path) -> dict[int, float]:
        """By step, of the metrics file that is there now."""
        try:
            lines = (directory / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return {}
        return {record["step"]: record["loss"] for record in map(_record, lines) if record}

    def put_aside(self, directory: Path) -> None:
        """Before a second start: a file of its own for its losses."""
        if (directory / "metrics.jsonl").exists():
            (directory / "metrics.jsonl").rename(directory / "metrics_before.jsonl")

    def start(self, directory: Path) -> int | None:
        """The step that the second start went on from; None when it made no step."""
        return min(self.losses(directory), default=0) - 1 if self.losses(directory) else None


@dataclass(frozen=True)
class Samecurve(Loop):
    strategy: str = "ddp"

    def command(self, directory: Path, work: Path, world: int) -> list[str]:
        strategy = ["--strategy", str(ROOT / "configs" / f"{self.strategy}.yaml")]
        recipe = work / "recipe.yaml"
        if not recipe.exists():
            write_recipe(recipe)
        return [*_torchrun(world), str(ROOT / "train.py"), str(recipe), f"output_dir={directory}", *strategy]

    def put_aside(self, directory: Path) -> None:
        """It keeps one metrics file for all starts, and run.json tells where the last one began."""

    def start(self, directory: Path) -> int | None:
        return json.loads((directory / "run.json").read_text())["start_step"]


def _samecurve(strategy: str) -> Samecurve:
    """One kind of file holds weights, moments and generators' states, of every rank a part."""
    first, last = "rank_00000.safetensors", "rank_00001.safetensors"
    return Samecurve(f"samecurve {strategy}", "", "step_*", first, last, "manifest.json", last, strategy=strategy)


LOOPS = {
    loop.name: loop
    for loop in (
        _samecurve("ddp"),
        Loop(
            "accelerate",
            "accelerate_loop.py",
            "checkpoint_*",
            weights="model.safetensors",
            optimizer="optimizer.bin",
            position="custom_checkpoint_0.pkl",
            generators="random_states_1.pkl",
        ),
        Loop(
            "trainer",
            "trainer_loop.py",
            "checkpoint-*",
            weights="model.safetensors",
            optimizer="optimizer.pt",
            position="trainer_state.json",
            generators="rng_state_1.pth",
            checkpoints=".",
        ),
        _samecurve("zero1"),
        Loop(
            "deepspeed",
            "deepspeed_loop.py",
            "global_step*",
            weights="mp_rank_00_model_states.pt",
            optimizer="zero_pp_rank_1_mp_rank_00_optim_states.pt",
            position="../latest",
            generators="",  # it saves none
        ),
    )
}

# What is to be said with a result, so that it is not read as more than it is.
NOTES = {
    ("deepspeed", "SIGSTOP of rank 1"): "DeepSpeed 0.19 clones the world group without the time given to "
    "init_distributed, so that torch's 30 minutes for gloo remain",
    ("deepspeed", "bit flip in a generator's state"): "it saves no generator's state; the flip is in the learning rate "
    "schedule's count of steps",
    ("deepspeed", "restart with 1 process"): "documented: convert the checkpoint by hand with ds_to_universal.py, then "
    "load_universal",
} | {
    (f"samecurve {strategy}", fault): text
    for strategy in ("ddp", "zero1")
    for fault, text in (
        ("full disk during a save", "by design, three saves in a row have to fail before the run ends"),
        ("weights of two checkpoints swapped", "both checkpoints are damaged; it refuses and names the file"),
    )
}


def write_recipe(path: Path) -> None:
    """The same model, texts, batch, optimizer and saves as toy.py's. Its own tokenizer, so its curve is another one."""
    data = path.parent / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in toy.documents()))
    recipe = {
        "seed": toy.SEED,
        "steps": toy.STEPS,
        "precision": "fp32",
        "model": {"config": {"model_type": "llama", **toy.MODEL}},
        "tokenizer": {"vocabulary_size": toy.VOCABULARY},
        "data": {"path": str(data)},
        "batch": {
            "global_batch_size": toy.GLOBAL_BATCH,
            "micro_batch_size": toy.GLOBAL_BATCH // 2,
            "sequence_length": toy.SEQUENCE,
        },
        "optimizer": {
            "learning_rate": toy.LEARNING_RATE,
            "weight_decay": toy.WEIGHT_DECAY,
            "max_grad_norm": toy.MAX_GRAD_NORM,
        },
        "schedule": {"warmup_steps": toy.WARMUP_STEPS},
        "checkpoint": {"every_steps": toy.SAVE_EVERY, "keep": toy.KEEP},
        "watchdog": {"timeout_seconds": int(toy.TIMEOUT.total_seconds())},
        "output_dir": str(path.parent / "unused"),
    }
    path.write_text(json.dumps(recipe))  # JSON is YAML


def _torchrun(world: int) -> list[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = ["--nproc_per_node", str(world), "--master_port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def _number(folder: Path) -> int:
    return int(re.findall("[0-9]+", folder.name)[-1])


def _record(line: str) -> dict | None:
    """None for a line that is still being written."""
    try:
        return json.loads(line)
    except ValueError:
        return None
