"""Go on from a checkpoint of transformers.Trainer, Accelerate's save_state, DeepSpeed ZeRO or torch's DCP.

The newest checkpoint in PATH becomes the first one of the recipe's output_dir. Then train.py resumes from it:

    python -m samecurve adopt out/ recipes/sft.yaml output_dir=runs/sft
    accelerate launch --config_file configs/fsdp.yaml train.py recipes/sft.yaml output_dir=runs/sft

Weights are always taken, AdamW's moments and the step where the format has them. No code of the checkpoint runs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from samecurve.cli.commands import Subcommand
from samecurve.errors import ConfigurationError
from samecurve.strategy import preflight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a folder of numbered ones")
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe that goes on from it")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values")


def run(arguments: argparse.Namespace) -> Subcommand:
    if not arguments.path.is_dir():
        raise ConfigurationError(f"{arguments.path}: no such folder; give a checkpoint, or the folder of several")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            "WORLD_SIZE: adopt is one process, whatever strategy trains later; run it without a launcher"
        )
    plan = preflight.plan([arguments.recipe, *arguments.overrides], os.environ)
    return Subcommand("samecurve.training.adoption", (plan, arguments.path))
