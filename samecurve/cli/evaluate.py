"""Measure a run's model: loss, perplexity, bits per byte, and what else its task measures.

DATA is read as the recipe of the run reads its data, but for what is named behind it: columns, and of a data set of the
hub its split. Without DATA it is what the run held out, and the numbers are those that the run itself wrote.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config import loader as recipes
from samecurve.config.documents import Document, format_problems
from samecurve.config.overrides import apply_override
from samecurve.config.rules import columns_of
from samecurve.errors import ConfigurationError
from samecurve.inference import loading
from samecurve.metrics.console import number, spaced
from samecurve.run.run_directory import read_metrics
from samecurve.specs.data_names import CHATML, is_hub_name
from samecurve.storage.atomic import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from samecurve.config.schema import Recipe
    from samecurve.interfaces.task import Task

LABEL_WIDTH, NUMBER_WIDTH = 20, 14
HUB_KEYS = ("data.split", "data.config", "data.revision")
PRECISIONS = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/sft")
    parser.add_argument("data", metavar="DATA", nargs="?", help="read like data.path; default: what was held out")
    parser.add_argument("columns", metavar="data.*=NAME", nargs="*", help="columns, split, config and revision of DATA")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another export of it, for example RUN/merged")
    parser.add_argument("--precision", choices=PRECISIONS, help="to compute in; default: the recipe's")
    parser.add_argument("--micro_batch_size", type=int, help="rows per forward pass; default: the recipe's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and what was measured there, too")


def run(arguments: argparse.Namespace) -> int:
    directory = loading.run_directory(arguments.run) or arguments.run
    of_the_run = loading.recipe(directory)
    trained = with_columns(of_the_run, arguments.data, arguments.columns)
    folder = loading.model_folder(arguments.model or directory)
    recipe = reading(trained, folder, arguments.data, arguments.micro_batch_size)
    base = loading.base_path(folder)
    if base is not None:
        loading.check_base(directory, base)
    recipe = recipe.model_copy(update={"precision": arguments.precision or recipe.precision})
    facts, metrics = measured(recipe, folder)
    before = _last_evaluation(directory) if arguments.data is None else {}
    source = arguments.data or (recipe.evaluation.path if recipe.evaluation else f"{recipe.data.name}, held out")
    if any((arguments.data, trained.data.split) == (part.path, part.split) for part in of_the_run.data.sources()):
        print(f"the run trained on {arguments.data}; without DATA only what it held out is measured")
    if base is not None and recipe.adapter.quantization:
        print(f"the run kept {base} in {recipe.adapter.quantization}; here it is whole, so losses differ a little")
    print(f"{folder} on {facts['device']} in {facts['precision']}; {facts['rows']:,} rows of {source}")
    print("\n".join(_table(metrics, before)))
    if arguments.json:
        about = {"run": directory, "model": folder, "data": source, **facts}
        write_json(arguments.json, {**about, "metrics": metrics, "run_wrote": before or None})
        print(arguments.json)
    return 0


def with_columns(recipe: Recipe, data: str | None, columns: Sequence[str]) -> Recipe:
    """The recipe with other names of columns, and of a data set of the hub with the part of it that is measured.

    Raises ConfigurationError for what names none that the task reads, and where a split is missing.
    """
    if data is not None and data.startswith("data.") and "=" in data:
        raise ConfigurationError(f"{data}: columns are those of DATA; name that first: evaluate RUN DATA {data}")
    of_the_hub = data is not None and is_hub_name(data)
    if of_the_hub and not any(column.startswith("data.split=") for column in columns):
        raise ConfigurationError(
            f"{data}: a data set of the hub has splits; name the one to measure on: evaluate RUN {data} data.split=test"
        )
    if not columns:
        return recipe
    known = [*columns_of(recipe.task), *(HUB_KEYS if of_the_hub else ())]
    document = Document("the run's recipe", recipe.model_dump(mode="json"))
    document.content["data"] |= {"config": None, "revision": None}  # those of the data that were trained on
    for argument in columns:
        apply_override(document, argument)
        key = argument.partition("=")[0]
        if key not in known and not document.problems:
            document.problem((key,), f"task {recipe.task} reads no such columns; it knows {', '.join(known)}")
    if document.problems:
        raise ConfigurationError(format_problems(document.problems))
    return recipes.validate_recipe(document)


def reading(recipe: Recipe, folder: Path, data: str | None, micro_batch_size: int | None = None) -> Recipe:
    """The recipe with the export's tokenizer. data: all of it is held out; None: what the recipe holds out.

    Raises ConfigurationError when there is nothing to measure on.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigurationError(f"--micro_batch_size: found {micro_batch_size}, a number of at least 1 is needed")
    # the export has its template; but dpo's reference is made again as training made it
    template = CHATML if recipe.tokenizer.chat_template == CHATML else None
    tokenizer = recipe.tokenizer.model_copy(
        update={"path": str(folder.absolute()), "vocabulary_size": None, "chat_template": template}
    )
    batch = {"micro_batch_size": micro_batch_size or recipe.batch.micro_batch_size}
    changed: dict[str, Any] = {"tokenizer": tokenizer}
    if data is not None:
        if not data.startswith("builtin:") and not is_hub_name(data) and not os.path.exists(os.path.expanduser(data)):
            raise ConfigurationError(f"DATA: no such file or folder: {Path(data).absolute()}")
        # Nothing is trained, but a task reads both parts; of the same path they are read once.
        whole = {"path": data, "mixture": None, "streaming": False, "labels": _classes(recipe, folder)}
        if is_hub_name(data):
            whole["pattern"] = None
        changed["data"] = read = recipe.data.model_copy(update=whole)
        split = read.split if is_hub_name(data) else None
        part = {"path": data, "split": split, "config": read.config, "revision": read.revision}
        changed["evaluate"] = recipe.evaluate.model_copy(update=part)
        if recipe.task != "embed":  # its loss depends on how many rows are told apart
            batch["global_batch_size"] = 1
    elif recipe.evaluation is None and not recipe.data.validation_fraction:
        raise ConfigurationError(
            "the run held nothing out (data.validation_fraction, evaluate.path); name what to measure on: "
            "evaluate RUN DATA"
        )
    return recipe.model_copy(update={**changed, "batch": recipe.batch.model_copy(update=batch)})


def _classes(recipe: Recipe, folder: Path) -> tuple[str, ...] | None:
    """A classifier's own, in their order: data may lack some of them. None where there are no classes."""
    if recipe.task != "classify":
        return None
    names = loading.stored_config(folder).id2label
    return tuple(names[index] for index in sorted(names))


def measured(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """(what was measured and how, the task's `eval_*` numbers): the model in `folder` on the recipe's held-out rows."""
    from samecurve.engines import factory
    from samecurve.engines.evaluation_engine import LoadedEngine
    from samecurve.models.attention.choice import chosen_attention
    from samecurve.specs.environment import versions
    from samecurve.tasks import registry
    from samecurve.training.evaluator import Evaluation

    task: Task = registry.load(recipe)
    config = loading.stored_config(folder)
    attention = chosen_attention(recipe, config, task.head.model_class(config), task.head.kind)
    model, _ = loading.load(folder, task.head, attention)
    engine = LoadedEngine(model, task, recipe)
    with _shown() as (start, advance):
        if task.has_reference:
            _prepare(task, recipe, advance)
        held_out = Evaluation(task.held_out, recipe.batch.micro_batch_size, engine.shard, advance)
        start(held_out.num_micro_batches)
        metrics = held_out.metrics(engine, task)
    facts = {"rows": len(task.held_out), "data_fingerprint": task.held_out.fingerprint, "precision": recipe.precision}
    return facts | {"device": factory.device_name(engine.accelerator), "versions": versions()}, metrics


def _prepare(task: Task, recipe: Recipe, alive: Callable[[], None]) -> None:
    """For a task that compares with the model that the run began with: it is made again as training made it."""
    from samecurve.config.schema import Adapter
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.engines.evaluation_engine import Beginning
    from samecurve.models.weights import skeleton

    plain = recipe.model_copy(update={"adapter": Adapter()})  # a new adapter adds nothing
    shape = skeleton(plain, task.vocabulary_size, task.special_tokens, task.head)
    task.prepare(Beginning(shape, plain, task), plain, shape, ControlGroup(), alive, held_out_only=True)


@contextmanager
def _shown() -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
    """(to be told how many micro-batches there are, to be called for each). A bar on a terminal, else nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("evaluating", total=None)
        yield lambda total: bar.update(shown, total=total, completed=0), lambda: bar.advance(shown)


def _last_evaluation(directory: Path) -> dict[str, float]:
    """`step` and the `eval_*` numbers that training wrote last; {} when it never evaluated."""
    for record in reversed(read_metrics(directory)):
        if record.get("eval_loss") is not None:
            return {key: value for key, value in record.items() if key == "step" or key.startswith("eval_")}
    return {}


def _table(metrics: dict[str, float], before: dict[str, float]) -> Iterator[str]:
    """A line per number; beside it what training wrote, and after which step, where there is that."""
    if before:
        yield f"{'':<{LABEL_WIDTH}}{'now':>{NUMBER_WIDTH}}   the run, after step {before['step']}"
    for name, value in metrics.items():
        was = f"   {number(before[name])}" if name in before else ""
        yield f"{spaced(name.removeprefix('eval_')):<{LABEL_WIDTH}}{number(value):>{NUMBER_WIDTH}}{was}"
