"""Print where a shipped recipe or strategy is, for accelerate launch and other programs that read the file themselves.

accelerate launch --config_file "$(samecurve path configs/fsdp.yaml)" -m samecurve.train recipes/lora.yaml
"""

from __future__ import annotations

import argparse
import os

from samecurve.config.key_hints import near_file
from samecurve.errors import ConfigurationError
from samecurve.specs.environment import shipped_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="such as recipes/lora.yaml or configs/fsdp.yaml")


def run(arguments: argparse.Namespace) -> int:
    path = shipped_file(arguments.name)
    if not os.path.isfile(path):
        raise ConfigurationError(f"{arguments.name}: no such file{near_file(arguments.name)}")
    print(path)
    return 0
