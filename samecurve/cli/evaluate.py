"""Evaluate a run's model: loss, perplexity, bits per byte, and the other metrics of its task.

DATA is read with the data settings of the run's recipe. Arguments after DATA override them: column names, and the
split, config and revision of a data set on the hub.

Without DATA, the model is evaluated on the run's held-out rows, and the numbers equal those of the run's own
evaluations.

With --watch, each checkpoint of a run that is still training is evaluated on its held-out rows, oldest first, by this
process and on its device. The numbers go to RUN/evaluations.jsonl, which reports and summaries read with those of the
run. The command ends when the run is done, has failed or was killed, or by Ctrl-C, and goes on where it stopped. A run
has one such command at a time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samecurve.cli.commands import Subcommand, add_code_arguments, allow_own_code
from samecurve.config import loader as recipes
from samecurve.config.adapter_folder import base_path
from samecurve.config.documents import Document, format_problems
from samecurve.config.inheritance import apply_override
from samecurve.config.rules import columns_of
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.inference import folders
from samecurve.specs.data_names import CHATML, is_hub_name
from samecurve.specs.precision import DTYPES
from samecurve.specs.tasks import TASKS

HUB_KEYS = ("data.split", "data.config", "data.revision")
_FILE_KEYS = ("data.pattern", "data.max_samples", "data.format", "data.ignore_columns", "data.bad_rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/sft")
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="evaluation data, as for data.path (default: the held-out rows of the run)",
    )
    parser.add_argument(
        "columns", metavar="data.KEY=NAME", nargs="*", default=[], help="settings of DATA, for example data.split=test"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="another export of the run, for example RUN/merged (default: RUN/model)",
    )
    parser.add_argument("--precision", choices=DTYPES, help="compute precision (default: the recipe's)")
    parser.add_argument(
        "--batch_size", type=int, metavar="N", help="rows per forward pass (default: the recipe's micro-batch size)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics, model and data to FILE")
    parser.add_argument("--watch", action="store_true", help="evaluate each checkpoint of a run while it trains")
    add_code_arguments(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    allow_own_code(arguments)
    directory = folders.run_directory(arguments.run) or arguments.run
    run_recipe = folders.read_recipe(directory)

    def measured(recipe: Recipe, folder: Path) -> Recipe:
        recipe = with_evaluation_data(recipe, folder, arguments.data, arguments.batch_size)
        recipe = folders.with_code(recipe, arguments.trust_remote_code)
        return recipe.model_copy(update={"precision": arguments.precision or recipe.precision})

    if arguments.watch:
        if given := [name for name in ("data", "--model", "--json") if getattr(arguments, name.lstrip("-"))]:
            raise ConfigurationError(f"--watch: reads the held-out rows of the run; leave out {', '.join(given)}")
        measured(run_recipe, directory)  # raises where no rows are held out
        return Subcommand("samecurve.bench.watch", (directory, measured, arguments.trust_remote_code))
    trained = with_columns(run_recipe, arguments.data, arguments.columns)
    folder = folders.model_folder(arguments.model or directory)
    recipe = measured(trained, folder)
    base_path(folder)  # raises where an adapter has lost its model
    sources = run_recipe.data.sources()
    trained_on = any((arguments.data, trained.data.split) == (part.path, part.split) for part in sources)
    return Subcommand("samecurve.bench.evaluation", (arguments, directory, folder, recipe, trained_on))


def with_columns(recipe: Recipe, data: str | None, columns: Sequence[str]) -> Recipe:
    """Replace the recipe's column names, and for a data set on the hub its split, config and revision.

    Args:
        recipe: the run's recipe.
        data: DATA of the command line.
        columns: `data.KEY=NAME` arguments.

    Raises:
        ConfigurationError: the task does not read such a column, or a data set on the hub has no split.
    """
    if data is not None and data.startswith("data.") and "=" in data:
        raise ConfigurationError(f"{data}: found in the place of DATA; give DATA first: evaluate RUN DATA {data}")
    of_the_hub = data is not None and is_hub_name(data)
    if of_the_hub and not any(column.startswith("data.split=") for column in columns):
        raise ConfigurationError(
            f"{data}: no split given for a data set of the hub; add one: evaluate RUN {data} data.split=test"
        )
    if data is not None:  # the number is of the rows that were trained on
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_samples": None})})
    if not columns:
        return recipe
    known = [*columns_of(recipe.task), *_FILE_KEYS, *(HUB_KEYS if of_the_hub else ())]
    document = Document("the run's recipe", recipe.model_dump(mode="json"))
    document.content["data"] |= {"config": None, "revision": None}  # those of the data that were trained on
    for argument in columns:
        apply_override(document, argument)
        key = argument.partition("=")[0]
        if key not in known and not document.problems:
            document.problem((key,), f"not a key of DATA for task {recipe.task}; use one of {', '.join(known)}")
    if document.problems:
        raise ConfigurationError(format_problems(document.problems))
    return recipes.validate_recipe(document)


def with_evaluation_data(recipe: Recipe, folder: Path, data: str | None, micro_batch_size: int | None = None) -> Recipe:
    """Change the recipe to use the export's tokenizer and the data to measure on.

    Args:
        recipe: the run's recipe.
        folder: the exported model.
        data: measure on all of these data; None: on the recipe's held-out data.
        micro_batch_size: rows per forward pass; None: the recipe's.

    Raises:
        ConfigurationError: there are no data to measure on.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigurationError(f"--batch_size: found {micro_batch_size}, but it must be at least 1")
    # The export has its own template. DPO's reference model, however, is rebuilt as training built it.
    template = CHATML if recipe.tokenizer.chat_template == CHATML else None
    tokenizer = recipe.tokenizer.model_copy(
        update={"path": str(folder.absolute()), "vocabulary_size": None, "chat_template": template}
    )
    batch = {"micro_batch_size": micro_batch_size or recipe.batch.micro_batch_size}
    changed: dict[str, Any] = {"tokenizer": tokenizer}
    if data is not None:
        if not data.startswith("builtin:") and not is_hub_name(data) and not os.path.exists(os.path.expanduser(data)):
            raise ConfigurationError(f"DATA: no such file or folder: {Path(data).absolute()}")
        # Nothing is trained, but a task reads both parts; parts with the same path are read once.
        # The classes are those of the exported model, of which the data may lack some (bench/evaluation.py).
        whole = {"path": data, "source": None, "mixture": None, "streaming": False, "labels": None}
        if is_hub_name(data):
            whole["pattern"] = None
        changed["data"] = read = recipe.data.model_copy(update=whole)
        split = read.split if is_hub_name(data) else None
        part = {"path": data, "split": split, "config": read.config, "revision": read.revision}
        changed["evaluate"] = recipe.evaluate.model_copy(update=part)
        # fewer rows than one global batch are refused; its size matters only to a loss across rows
        if not TASKS[recipe.task].contrasts_rows:
            batch["global_batch_size"] = 1
    elif recipe.evaluation is None and not recipe.data.validation_fraction:
        raise ConfigurationError(
            "DATA: the run held out no rows (data.validation_fraction, evaluate.path); give the data to evaluate on: "
            "evaluate RUN DATA"
        )
    return recipe.model_copy(update={**changed, "batch": recipe.batch.model_copy(update=batch)})
