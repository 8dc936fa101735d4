"""Merge an adapter into its base model's weights, and prove that the logits equal those of the unmerged model."""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Work
from samecurve.errors import ConfigurationError, StorageError
from samecurve.inference import folders
from samecurve.specs.precision import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with an adapter")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="precision of the stored weights; the check runs in fp32"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: RUN/merged, RUN/merged-DTYPE")


def run(arguments: argparse.Namespace) -> Work:
    folder = folders.model_folder(arguments.run)
    base = folders.base_path(folder)
    if base is None:
        raise ConfigurationError(f"{folder} holds a whole model and no adapter: there is nothing to merge")
    suffix = "" if arguments.dtype == "fp32" else f"-{arguments.dtype}"
    output = arguments.output or arguments.run / f"merged{suffix}"
    if output.exists():
        raise StorageError(f"{output} is there already; name another folder with --output")
    return Work("samecurve.inference.merge_lora", (arguments, folder, base, output))
