"""Merge an adapter into the weights of its base model, and check that the logits stay the same.

The merged model is read back from the disk and compared with the base model and its adapter, in fp32. A merged model
that differs is deleted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Subcommand, add_trust_argument
from samecurve.config.adapter_folder import base_path
from samecurve.errors import ConfigurationError, StorageError
from samecurve.inference import folders
from samecurve.specs.precision import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with an adapter")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="precision of the stored weights (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="default: RUN/merged; RUN/merged-DTYPE if not fp32",
    )
    add_trust_argument(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    folder = folders.model_folder(arguments.run)
    base = base_path(folder)
    if base is None:
        raise ConfigurationError(f"{folder}: a whole model, not an adapter; nothing to merge")
    suffix = "" if arguments.dtype == "fp32" else f"-{arguments.dtype}"
    output = arguments.output or arguments.run / f"merged{suffix}"
    if output.exists():
        raise StorageError(f"{output}: exists already; choose another folder with --output")
    return Subcommand("samecurve.inference.merge_lora", (arguments, folder, base, output))
