"""Go on from another trainer's checkpoint, or make a recipe of its configuration.

The newest checkpoint in PATH, of transformers.Trainer, Accelerate's save_state, DeepSpeed ZeRO or torch's DCP, becomes
the first one of the recipe's output_dir. Then train.py resumes from it:

    python -m samecurve adopt out/ recipes/sft.yaml output_dir=runs/sft
    accelerate launch --config_file configs/fsdp.yaml train.py recipes/sft.yaml output_dir=runs/sft

Weights are always taken, AdamW's moments and the step where the format has them. No code of the checkpoint runs.

With --config a YAML of TRL, LLaMA-Factory, axolotl or ms-swift, or a shell script with their command, becomes a recipe:

    python -m samecurve adopt --config llama3_lora_sft.yaml --num_processes 8
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from pathlib import Path

from samecurve.cli.commands import Subcommand
from samecurve.cli.summary import quoted
from samecurve.config import loader
from samecurve.config.inheritance import read_value
from samecurve.config.trainers import files, recipe_text
from samecurve.config.trainers.translation import translate
from samecurve.errors import ConfigurationError
from samecurve.specs.environment import train_script
from samecurve.storage.atomic import write_text
from samecurve.strategy import preflight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", nargs="?", type=Path, help="a checkpoint, or a folder of numbered ones")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="the recipe that goes on from it")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a configuration that becomes a recipe")
    parser.add_argument("--trainer", choices=files.TRAINERS, help="whose it is; default: by its keys")
    parser.add_argument(
        "--method", metavar="NAME", help="TRL, ms-swift: sft, dpo, ...; default: by the file's name, sft"
    )
    parser.add_argument(
        "--num_processes", type=int, metavar="N", help="devices that the configuration was meant for; default 1"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: the configuration's name here, .yaml")


def run(arguments: argparse.Namespace) -> Subcommand | int:
    if arguments.config:
        return adopt_config(arguments)
    if arguments.path is None or arguments.recipe is None:
        raise ConfigurationError("adopt: give PATH and RECIPE, or --config FILE")
    if not arguments.path.is_dir():
        raise ConfigurationError(f"{arguments.path}: no such folder; give a checkpoint, or the folder of several")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            "WORLD_SIZE: adopt is one process, whatever strategy trains later; run it without a launcher"
        )
    plan = preflight.plan([arguments.recipe, *arguments.overrides], os.environ)
    return Subcommand("samecurve.training.adoption", (plan, arguments.path))


def adopt_config(arguments: argparse.Namespace) -> int:
    """Write the recipe of another trainer's configuration and say what became of each key.

    Raises:
        ConfigurationError: it cannot be read, its method is not built here, or the recipe exists.
    """
    source = files.read(arguments.config, arguments.trainer, arguments.method)
    given = source.settings | ({"num_processes": arguments.num_processes} if arguments.num_processes else {})
    path = arguments.output or Path(f"{arguments.config.stem}.yaml")
    if path.exists():
        raise ConfigurationError(f"{path}: exists already; name another file with --output")
    made = translate(source.trainer, given)
    for word in [str(word) for word in (arguments.path, arguments.recipe, *arguments.overrides) if word]:
        key, equals, text = word.partition("=")
        value, problems = read_value(text)
        if not equals or problems:
            raise ConfigurationError(f"adopt --config: found {word}, expected key.path=value")
        made.values[key] = value
        # what a value of the command line mends is no longer without an equal
        made.no_equal = {name: why for name, why in made.no_equal.items() if not why.startswith(f"{key}: ")}
    recipe_text.settle(made)
    write_text(path, recipe_text.recipe_text(made, f"{arguments.config.name} of {source.trainer.name}"))
    num_translated = len(given) - len(made.no_effect) - len(made.no_equal.keys() & given.keys())
    print(f"{path} is written: {num_translated} keys of {source.trainer.name} are translated")
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key, reason in made.no_effect.items():
        by_reason[reason].append(key)
    for reason, keys in by_reason.items():
        print(f"no effect here: {', '.join(keys)} ({reason})")
    for key, nearest in made.no_equal.items():
        print(f"NO EQUAL, the training differs: {key}; {nearest}")
    processes = int(given.get("num_processes") or 1)
    rows = made.values["batch.global_batch_size"]
    print(f"batch.global_batch_size is {rows} for {processes} process{'es' if processes > 1 else ''} (--num_processes)")
    strategy = files.strategy_of(given)
    options = f" --strategy {quoted(Path(strategy))} --num_processes {processes}" if strategy else ""
    to_mend = loader.read_recipe(str(path)).document.problems
    for problem in to_mend:
        print(f"to mend in {path}: {problem}")
    print(f"python -m samecurve inspect {quoted(path)}")
    print(f"python {train_script()} {quoted(path)}{options}")
    return 2 if to_mend else 0
