"""Evaluation of a trained model on held-out data in a single process, for the command `evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

from samecurve.config.adapter_folder import base_path
from samecurve.config.schema import Adapter, Recipe
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.engines.evaluation_engine import EvaluationEngine, InitialModel
from samecurve.inference import loading
from samecurve.interfaces.task import InitialState, Task
from samecurve.metrics.console import number, spaced
from samecurve.models.attention.choice import choose_attention
from samecurve.run.run_directory import METRICS_LINE
from samecurve.specs.environment import versions
from samecurve.specs.tasks import TASKS
from samecurve.storage.atomic import write_json
from samecurve.storage.jsonl import last_record
from samecurve.storage.terminal import TextConsole
from samecurve.tasks import registry
from samecurve.tasks.task_skeleton import skeleton_of
from samecurve.training.evaluator import Evaluation

LABEL_WIDTH, NUMBER_WIDTH = 20, 14


def run(arguments: argparse.Namespace, directory: Path, folder: Path, recipe: Recipe, trained_on: bool) -> int:
    """Run the command `evaluate`.

    Args:
        directory: the run directory.
        folder: the folder of its model.
        recipe: describes the data to read.
        trained_on: whether the run trained on DATA.
    """
    base = base_path(folder)
    if arguments.data is not None and "data.labels" in TASKS[recipe.task].reads:
        labels = loading.class_names(
            loading.stored_config(folder, arguments.trust_remote_code)
        )  # the data may lack some of them
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"labels": labels})})
    loading.check_base_model(directory, base)
    facts, metrics = evaluate_folder(recipe, folder, arguments.trust_remote_code)
    # the run's own numbers are of its held-out rows, with which other data cannot be compared
    last = last_record(directory / "metrics.jsonl", METRICS_LINE | {"eval_loss": float}) or {}
    last = last if arguments.data is None else {}
    before = {key: value for key, value in last.items() if key == "step" or key.startswith("eval_")}
    source = arguments.data or (recipe.evaluation.path if recipe.evaluation else f"{recipe.data.name}, held out")
    if trained_on:
        print(f"warning: the run trained on {arguments.data}; leave out DATA to evaluate on its held-out rows")
    if base is not None and recipe.adapter.quantization:
        print(
            f"the run quantized {base} to {recipe.adapter.quantization}, which is not done here: losses differ slightly"
        )
    print(f"{folder} on {facts['device']} in {facts['precision']}; {facts['rows']:,} rows of {source}")
    if before:
        print(f"{'':<{LABEL_WIDTH}}{'now':>{NUMBER_WIDTH}}   in the run, after step {before['step']}")
    for name, value in metrics.items():
        was = f"   {number(before[name])}" if name in before else ""
        print(f"{spaced(name.removeprefix('eval_')):<{LABEL_WIDTH}}{number(value):>{NUMBER_WIDTH}}{was}")
    if arguments.json:
        about = {"run": directory, "model": folder, "data": source, **facts}
        write_json(arguments.json, {**about, "metrics": metrics, "run_wrote": before or None})
        print(arguments.json)
    return 0


def evaluate_folder(
    recipe: Recipe, folder: Path, trust_remote_code: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """Evaluate the model in `folder` on the recipe's validation rows. trust_remote_code: see `loading.load_model`.

    Returns:
        (facts about data, hardware and versions; the task's `eval_*` numbers).
    """
    task: Task = registry.load_task(recipe)
    assert task.validation is not None  # cli/evaluate.py refuses to start without rows to measure on
    model_class, config = loading.stored_class(folder, task.head, trust_remote_code)
    attention = choose_attention(recipe, config, model_class, task.head.kind)
    model, _ = loading.load_with_tokenizer(folder, task.head, attention, trust_remote_code)
    engine = EvaluationEngine(model, task, recipe)
    with _progress_bar() as (start, advance):
        if task.has_reference:
            # prepare a task that compares with the run's initial model, which is rebuilt as training built it
            # a new adapter adds nothing
            adapter = recipe.adapter.model_copy(update={"quantization": None}) if recipe.adapter.path else Adapter()
            plain = recipe.model_copy(update={"adapter": adapter})
            shape = skeleton_of(plain, task)
            model = InitialModel(shape, plain, task)
            task.prepare(InitialState(model, plain, shape, ControlGroup(), advance, validation_only=True))
        validation = Evaluation(task.validation, recipe.batch.micro_batch_size, engine.shard, advance)
        start(validation.num_micro_batches)
        metrics = validation.metrics(engine, task)
    facts = {
        "rows": len(task.validation),
        "data_fingerprint": task.validation.fingerprint,
        "precision": recipe.precision,
    }
    return facts | {"device": factory.device_name(engine.accelerator), "versions": versions()}, metrics


@contextmanager
def _progress_bar() -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
    """Show a progress bar on a terminal. Yields (function to set the total, function to call per micro-batch)."""
    console = TextConsole(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("evaluating", total=None)
        yield lambda total: bar.update(shown, total=total, completed=0), lambda: bar.advance(shown)
