"""Write a recipe from the answers to five questions, as `accelerate config` does, and print the commands to run it.

Enter takes the default in brackets. An option answers its question beforehand; with --yes, or without a terminal,
nothing is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from pathlib import Path

from samecurve.cli.summary import quoted
from samecurve.config import loader
from samecurve.config.documents import Document, format_problems
from samecurve.errors import ConfigurationError
from samecurve.planner import model_shape
from samecurve.specs.environment import ROOT, train_script
from samecurve.specs.optimizers import usual_rates
from samecurve.specs.tasks import TASKS
from samecurve.storage.atomic import write_text

GIB = 1 << 30
# of weight, gradient and Adam's two moments in fp32; of a frozen weight in bf16, and in 4 bits with its scales
TRAINED_BYTES, FROZEN_BYTES, QUANTIZED_BYTES = 16, 2, 0.6
FREE = 0.6  # share of a device that these bytes may take; activations take the rest
NO_KINDS = ("base", "tiny")
QUESTIONS = {
    "kind": "What is trained, by the name of a shipped recipe: {kinds}",
    "model_path": "Model: a hub name or a folder; none is a small one from scratch",
    "data_path": "Data: a file, a folder or a data set of the hub",
    "devices": "GPUs and the GiB of each, such as 8x80; 0 is a CPU",
    "length": "Length: 3 epochs, or 500 steps",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the recipe is written to NAME.yaml, its runs go to runs/NAME")
    for option, text in QUESTIONS.items():
        short = text.partition(":")[0] if option != "kind" else "the shipped recipe that this one is based on"
        parser.add_argument(f"--{option}", metavar="ANSWER", help=short[:1].lower() + short[1:])
    parser.add_argument("--yes", action="store_true", help="ask nothing; take the defaults of what no option answers")


def run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.name).with_suffix(".yaml")
    if path.exists():
        raise ConfigurationError(f"{path}: exists already; choose another name, or remove it")
    kinds = [file.stem for file in sorted((ROOT / "recipes").glob("*.yaml")) if file.stem not in NO_KINDS]

    def answer(option: str, default: str) -> str:
        given = getattr(arguments, option)
        if given is None and not arguments.yes and sys.stdin.isatty():
            with contextlib.suppress(EOFError):  # Ctrl-D: the default
                given = input(f"{QUESTIONS[option].format(kinds=', '.join(kinds))} [{default}]: ").strip()
        return given or default

    kind = answer("kind", "lora")
    if kind not in kinds:
        raise ConfigurationError(f"--kind: found {kind}, expected one of {', '.join(kinds)}")
    base = loader.read_recipe(f"recipes/{kind}.yaml").document
    own = base.get("model", "path") or "none"
    model = answer("model_path", own)
    data = answer("data_path", base.get("data", "path") or "builtin:python-stdlib")
    gpus, gib = _devices(answer("devices", "0"))
    number, unit = _length(answer("length", f"{base.get('steps') or 500} steps"))
    if model == "none" != own:
        raise ConfigurationError(
            f"--model_path: found none, but recipes/{kind}.yaml trains a pretrained model; name one"
        )
    values: dict[str, tuple[object, str]] = {"output_dir": (f"runs/{path.stem}", "checkpoints, curves and the model")}
    if model != own:
        values["model.path"] = (model, "replaces the model of the base recipe")
        rates = usual_rates(
            base.get("task"), base.get("adapter", "name") is not None, base.get("optimizer", "name") or "adamw"
        )
        if base.get("model", "path") is None and rates:  # the base recipe's was for its small model from scratch
            values["optimizer.learning_rate"] = float(rates.split()[0]), f"{rates} is usual for a pretrained model"
    values["data.path"] = (data, f"`samecurve inspect {path}` shows its rows and what is trained of them")
    if gpus:
        values["precision"] = ("bf16", "16-bit products; fp16 on GPUs before Ampere")
    values[unit] = (number, "passes over the data" if unit == "epochs" else "optimizer steps")
    strategy, note = _strategy(base, model, gpus, gib)
    # before anything is written; text=json keeps numbers in names text
    overrides = [f"{key}={json.dumps(value)}" for key, (value, _) in values.items()]
    if problems := loader.read_recipe(f"recipes/{kind}.yaml", overrides).document.problems:
        raise ConfigurationError(format_problems(problems))
    write_text(path, _text(kind, values))
    processes = f" --strategy {strategy} --num_processes {gpus}" if strategy else ""
    shown, train = quoted(path), train_script()
    print(f"{path} is written. {note}".rstrip())
    print(f"python -m samecurve inspect {shown}    # rows, and which of their tokens are trained")
    print(f"python {train} {shown}{processes}")
    print(f"python -m samecurve report runs/{quoted(path.stem)}    # curves and numbers on one page")
    return 0


def _devices(text: str) -> tuple[int, float]:
    """Read "8x80" as 8 GPUs of 80 GiB each, "0" as a CPU."""
    match = re.fullmatch(r"(\d{1,5})\s*[xX*]\s*(\d{1,4}(?:\.\d+)?)", text)
    if match is None and text != "0":
        raise ConfigurationError(f"--devices: found {text}, expected GPUs x GiB of each, such as 8x80, or 0 for a CPU")
    return (int(match[1]), float(match[2])) if match else (0, 0.0)


def _length(text: str) -> tuple[int, str]:
    match = re.fullmatch(r"(\d{1,9})\s*(epochs?|steps?)", text)
    if match is None or not int(match[1]):
        raise ConfigurationError(f"--length: found {text}, expected 3 epochs, or 500 steps")
    return int(match[1]), f"{match[2].rstrip('s')}s"


def _strategy(base: Document, model: str, gpus: int, gib: float) -> tuple[str, str]:
    """Choose by memory: ddp where the whole training state fits on each device, else fsdp. Returns its name and a note.

    The number of parameters is that of a config.json here or in the hub's cache, else the one in the model's name.
    """
    if not gpus or model == "none":
        return ("ddp" if gpus > 1 else ""), ""
    parameters = 0.0
    try:
        parameters = float(model_shape.shape(model_shape.read(model), model).parameters)
    except ConfigurationError:
        match = re.search(r"(?<![\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z])", model)
        parameters = int(match[1] or 1) * float(match[2]) * (1e9 if match[3] in "bB" else 1e6) if match else 0.0
    quantized = base.get("adapter", "quantization") is not None
    size = QUANTIZED_BYTES if quantized else FROZEN_BYTES if base.get("adapter", "name") else TRAINED_BYTES
    state = parameters * size / GIB
    name = "" if gpus == 1 else "ddp" if quantized or 0 < state < FREE * gib else "fsdp"
    if not parameters:
        return name, "The model's size is not known here; `samecurve plan` compares the strategies once it is."
    if state > FREE * gib * (1 if name in ("", "ddp") else gpus):
        smaller = "another model" if quantized else "qlora" if size == FROZEN_BYTES else "an adapter (lora, qlora)"
        text = f"too much for {gpus} x {gib:g} GiB; use {smaller}, more devices, or configs/zero3_offload.yaml"
        return name, f"Weights and training state of {model} take {state:,.0f} GiB, {text}."
    return name, ""


def _text(kind: str, values: dict[str, tuple[object, str]]) -> str:
    """The YAML of the values, a comment beside each one."""
    what = TASKS[loader.read_recipe(f"recipes/{kind}.yaml").document.get("task") or "pretrain"]
    row = f" A row of the data is {what.row}." if what.row else ""
    lines = [f"# Based on recipes/{kind}.yaml, whose other values hold.{row} All keys: docs/recipe_reference.md"]
    lines.append(f"base: recipes/{kind}.yaml")
    blocks: dict[str, list[str]] = {}
    for key, (value, comment) in values.items():
        block, _, name = key.rpartition(".")
        shown = f"{value:.0e}".replace("e-0", "e-") if isinstance(value, float) else json.dumps(value)
        blocks.setdefault(block, []).append(f"{'  ' * bool(block)}{name}: {shown}   # {comment}")
    for block, content in blocks.items():
        lines += [f"{block}:", *content] if block else content
    return "\n".join([*lines, ""])
