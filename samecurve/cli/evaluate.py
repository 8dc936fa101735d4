"""Measure a run's model: loss, perplexity, bits per byte, and what else its task measures.

DATA is read as the recipe of the run reads its data, but for columns that are named behind it. Without DATA it is what
the run held out, and the numbers are those that the run itself wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hub
from .. import recipe as recipes
from ..chatml import CHATML
from ..documents import Document, override, report
from ..errors import ConfigurationError
from ..progress import number, spaced
from ..records import write_json
from ..rules import columns_of
from ..rundir import read_metrics
from . import models

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import Recipe
    from ..tasks import Task

LABEL_WIDTH, NUMBER_WIDTH = 20, 14
PRECISIONS = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/sft")
    parser.add_argument("data", metavar="DATA", nargs="?", help="a file or folder like data.path; default: held out")
    parser.add_argument("columns", metavar="data.*_column=NAME", nargs="*", help="where DATA has other columns")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another export of it, for example RUN/merged")
    parser.add_argument("--precision", choices=PRECISIONS, help="to compute in; default: the recipe's")
    parser.add_argument("--micro_batch_size", type=int, help="rows per forward pass; default: the recipe's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and what was measured there, too")


def run(arguments: argparse.Namespace) -> int:
    directory = models.run_directory(arguments.run) or arguments.run
    trained = with_columns(models.recipe(directory), arguments.data, arguments.columns)
    folder = models.model_folder(arguments.model or directory)
    recipe = reading(trained, folder, arguments.data, arguments.micro_batch_size)
    base = models.base_path(folder)
    if base is not None:
        models.check_base(directory, base)
    recipe = recipe.model_copy(update={"precision": arguments.precision or recipe.precision})
    facts, metrics = measured(recipe, folder)
    before = _last_evaluation(directory) if arguments.data is None else {}
    source = arguments.data or recipe.evaluate.path or f"{recipe.data.name}, held out"
    if arguments.data in [source.path for source in trained.data.sources()]:
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
    """The recipe with other names of columns. Raises ConfigurationError for what names none that the task reads."""
    if data is not None and data.startswith("data.") and "=" in data:
        raise ConfigurationError(f"{data}: columns are those of DATA; name that first: evaluate RUN DATA {data}")
    if not columns:
        return recipe
    known = columns_of(recipe.task)
    document = Document("the run's recipe", recipe.model_dump(mode="json"))
    for argument in columns:
        override(document, argument)
        key = argument.partition("=")[0]
        if key not in known and not document.problems:
            document.problem((key,), f"task {recipe.task} reads no such columns; it knows {', '.join(known)}")
    if document.problems:
        raise ConfigurationError(report(document.problems))
    return recipes.validated(document)


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
        if not data.startswith("builtin:") and not hub.is_name(data) and not Path(data).expanduser().exists():
            raise ConfigurationError(f"DATA: no such file or folder: {Path(data).absolute()}")
        # Nothing is trained, but a task reads both parts; of the same path they are read once.
        whole = {"path": data, "mixture": None, "streaming": False, "labels": _classes(recipe, folder)}
        changed["data"] = recipe.data.model_copy(update=whole)
        changed["evaluate"] = recipe.evaluate.model_copy(update={"path": data})
        if recipe.task != "embed":  # its loss depends on how many rows are told apart
            batch["global_batch_size"] = 1
    elif recipe.evaluate.path is None and not recipe.data.held_out_fraction:
        raise ConfigurationError(
            "the run held nothing out (data.held_out_fraction, evaluate.path); name what to measure on: "
            "evaluate RUN DATA"
        )
    return recipe.model_copy(update={**changed, "batch": recipe.batch.model_copy(update=batch)})


def _classes(recipe: Recipe, folder: Path) -> tuple[str, ...] | None:
    """A classifier's own, in their order: data may lack some of them. None where there are no classes."""
    if recipe.task != "classify":
        return None
    names = models.stored_config(folder).id2label
    return tuple(names[index] for index in sorted(names))


def measured(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """(what was measured and how, the task's `eval_*` numbers): the model in `folder` on the recipe's held-out rows."""
    from .. import engines, tasks
    from ..architecture import chosen_attention
    from ..engines.loaded import LoadedEngine
    from ..evaluation import Evaluation
    from ..facts import versions

    task: Task = tasks.load(recipe)
    attention = chosen_attention(recipe, models.stored_config(folder), task.head)
    model, _ = models.load(folder, task.head, attention)
    engine = LoadedEngine(model, task, recipe)
    with _shown() as (start, advance):
        if task.has_reference:
            _prepare(task, recipe, advance)
        held_out = Evaluation(task.held_out, recipe.batch.micro_batch_size, engine.shard, advance)
        start(held_out.num_micro_batches)
        metrics = held_out.metrics(engine, task)
    facts = {"rows": len(task.held_out), "data_fingerprint": task.held_out.fingerprint, "precision": recipe.precision}
    return facts | {"device": engines.device_name(engine.accelerator), "versions": versions()}, metrics


def _prepare(task: Task, recipe: Recipe, alive: Callable[[], None]) -> None:
    """For a task that compares with the model that the run began with: it is made again as training made it."""
    from ..config import Adapter
    from ..engines.loaded import Beginning
    from ..model import skeleton
    from ..world import World

    plain = recipe.model_copy(update={"adapter": Adapter()})  # a new adapter adds nothing
    shape = skeleton(plain, task.vocabulary_size, task.special_tokens, task.head)
    task.prepare(Beginning(shape, plain, task), plain, shape, World(), alive, held_out_only=True)


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
