"""Rules that involve more than one recipe key. A rule is skipped when a key that it reads is itself invalid.

Each rule is one function, so that an invalid key hides only the problems of rules that read it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from samecurve.config import paths, rules_data, rules_model, rules_tasks, rules_training
from samecurve.config.documents import Finding, describe
from samecurve.config.inheritance import UNITS
from samecurve.config.paths import path_problem, pattern_hint
from samecurve.config.schema import Recipe
from samecurve.config.schema_training import num_warmup_steps
from samecurve.config.section import Section
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.specs.data_names import CHATML, MODULES, is_hub_name
from samecurve.specs.tasks import OF_REGRESSION, TASKS, readers

Rule = Callable[[Callable[[str], Any]], Iterator[Finding]]


def apply_rules(source: RecipeSource) -> None:
    """Check all rules and add their findings to the source's problems."""
    parts = rules_model, rules_tasks, rules_data, rules_training, paths
    rules: list[Rule] = [*RULES, *(rule for part in parts for rule in part.RULES)]
    for index in range(source.length("data.mixture")):
        rules += [partial(_readable, f"data.mixture.{index}.path"), *rules_data.in_mixture(index)]
    for rule in rules:
        with contextlib.suppress(InvalidValue):
            for key, text in rule(source.value):
                source.document.problem(tuple(key.split(".")), text)


def columns_of(task: str) -> list[str]:
    """The recipe keys that name data columns of the task."""
    return [key for key in TASKS[task].reads if key.endswith(("_column", "_columns"))]


def _no_data(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.path") is value("data.mixture") is value("data.source") is None:
        task = _known(value, "task")
        builtin = TASKS[task].builtin if task else ""
        names = f"a file, a folder or {builtin}" if builtin else "a file or a folder"
        yield "data.path", f"missing; set it to {names}, in the recipe or with data.path=... on the command line"


def _readable(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    path, task, streaming = value(key), _known(value, "task"), _known(value, "data.streaming")
    if path is None:
        return
    if "://" in path:
        if not key.startswith("data.") or streaming is False:
            text = f"found {path}, but only training data can be at a URL, and only with data.streaming: true"
            yield key, f"{text}; set it, or download the data"
    elif any(path == spec.builtin for spec in TASKS.values()):
        if task is not None and path != TASKS[task].builtin:
            instead = TASKS[task].builtin or "a file or a folder"
            yield key, f"found {path}, which task {task} cannot read; use {instead}"
    elif is_hub_name(path):
        return  # downloaded when the data are read
    elif problem := path_problem(path):
        owner = "data.pattern" if key in ("data.path", "evaluate.path") else key.replace("path", "pattern")
        # messages that begin with "no" name the path already
        yield key, (problem if problem.startswith("no ") else f"{path} {problem}") + pattern_hint(path, owner)


def _known(value: Callable[[str], Any], key: str) -> Any:
    """The value of a key, or None where the key is invalid."""
    with contextlib.suppress(InvalidValue):
        return value(key)
    return None


def _nothing_truncated(value: Callable[[str], Any]) -> Iterator[Finding]:
    """data.truncation where documents are continued in the next row, or are not known before training."""
    given, task = value("data.truncation"), value("task")
    if given == _default("data.truncation") or task not in readers("data.truncation"):
        return
    if task in readers("data.streaming") and value("data.packing"):
        text = f"found {given}, but packed documents of task {task} continue in the next row and none is too long; "
        yield "data.truncation", f"{text}remove it, or set data.packing to false"
    elif value("data.streaming"):
        text = f"found {given}, but data.streaming does not know the lengths of all documents; set it to right"
        yield "data.truncation", text


def _of_tasks(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """A key has no effect because the task does not use it."""
    task, given, tasks = value("task"), value(key), readers(key)
    # at its default a key asks for nothing
    if key not in TASKS[task].reads and given != _default(key):
        which = f"task {tasks[0]} uses" if len(tasks) == 1 else f"the tasks {', '.join(tasks)} use"
        yield key, f"found {describe(given)}, but only {which} this key and task is {task}; remove it"


def _default(key: str) -> Any:
    *blocks, name = key.split(".")
    section: type[Section] = Recipe
    for block in blocks:
        annotation = section.model_fields[block].annotation
        assert isinstance(annotation, type) and issubclass(annotation, Section), key
        section = annotation
    return section.model_fields[name].default


def _not_packed(value: Callable[[str], Any]) -> Iterator[Finding]:
    task = value("task")
    if TASKS[task].row and value("data.packing"):
        yield "data.packing", f"found true, but task {task} cannot pack: a row holds {TASKS[task].row}; set it to false"


def _classes(value: Callable[[str], Any]) -> Iterator[Finding]:
    labels = value("data.labels") or ()
    twice = next((name for name in labels if labels.count(name) > 1), None)
    if twice is not None:
        yield "data.labels", f"class {twice} is listed twice; remove one"
    if labels and value("data.path") == MODULES:
        yield "data.labels", f"found a list, but {MODULES} brings its own classes; remove it"


def _one_kind_of_row(other: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.messages_column") is not None and value(other) is not None:
        yield "data.messages_column", f"conflicts with {other}: rows hold messages or a prompt, not both; keep one"


def _messages_without_template(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.messages_column") is not None and not value("data.chat"):
        yield "data.chat", "found false, but messages need a chat template; set it to true, or use prompt_column"
    if value("data.chat_template_kwargs") and not value("data.chat"):
        yield "data.chat_template_kwargs", "found variables, but data.chat=false uses no chat template; remove them"


def _reasoning(value: Callable[[str], Any]) -> Iterator[Finding]:
    other = "data.chat=false" if not value("data.chat") else f"data.train_on={value('data.train_on')}"
    if value("data.reasoning") == "keep" and other != "data.train_on=assistant":
        yield "data.reasoning", f"found keep, but with {other} a conversation is one row anyway; remove it"


def _problem_type(value: Callable[[str], Any]) -> Iterator[Finding]:
    problem_type = value("classify.problem_type")
    if value("task") != "classify" or problem_type == "single_label":
        return
    if value("data.path") == MODULES:
        text = f"found {problem_type}, but {MODULES} has one class for each text; set data.path to a table with labels"
        yield "classify.problem_type", text
    elif value("data.labels") and problem_type != "multi_label":
        text = f"found a list, but labels of classify.problem_type={problem_type} are numbers; remove it"
        yield "data.labels", text


def _token_weights(value: Callable[[str], Any]) -> Iterator[Finding]:
    if not value("data.token_weights"):
        return
    for key, wanted in (("task", "sft"), ("data.train_on", "assistant")):
        if value(key) != wanted:
            yield "data.token_weights", f"found true, which needs {key}: {wanted}, and that is {value(key)}; remove it"


def _token_weights_of_liger(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.token_weights") and value("loss.implementation") == "liger":
        text = "found true, but Liger's kernel has no weights of tokens; set loss.implementation to auto"
        yield "data.token_weights", text


def _whole_conversations(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.messages_column") is not None and value("data.train_on") == "completion":
        text = "found completion, but the conversations of data.messages_column have no separate prompt; use "
        yield "data.train_on", text + "assistant, or prompt_column and completion_column instead"


def _template(value: Callable[[str], Any]) -> Iterator[Finding]:
    template = value("tokenizer.chat_template")
    if template not in (None, CHATML) and not Path(template).is_file():
        text = f"no such file: {Path(template).absolute()}; give a template file, or {CHATML}, which needs no file"
        yield "tokenizer.chat_template", text


def _template_date(value: Callable[[str], Any]) -> Iterator[Finding]:
    day = value("tokenizer.template_date")
    try:
        date.fromisoformat(day or "2000-01-01")
    except ValueError:
        yield "tokenizer.template_date", f"found {day}, which is not a day of the calendar; write YYYY-MM-DD"


def _epochs(value: Callable[[str], Any]) -> Iterator[Finding]:
    for steps, epochs in UNITS:
        key, own = ".".join(epochs), ".".join(steps)
        if value(key) is not None and value("data.streaming"):
            yield key, f"found {value(key):g}, but the number of a stream's rows is not known; give {own}"
        elif value(key) is not None and value("data.mixture") is not None:
            text = "but each source of data.mixture has epochs of its own, which the header shows"
            yield key, f"found {value(key):g}, {text}; give {own}"


def _warmup(value: Callable[[str], Any]) -> Iterator[Finding]:
    steps, warmup = value("steps"), value("schedule.warmup_steps")
    if warmup is not None and warmup >= steps and value("epochs") is None:
        text = f"found {warmup}, but steps is {steps} and warm-up must end earlier; use at most {steps - 1}"
        yield "schedule.warmup_steps", f"{text}, or warmup_ratio"


def _two_warmups(value: Callable[[str], Any]) -> Iterator[Finding]:
    steps, ratio = value("schedule.warmup_steps"), value("schedule.warmup_ratio")
    if steps is not None and ratio is not None:
        yield "schedule.warmup_ratio", f"found {ratio:g}, but warmup_steps is {steps}; keep one of them"


def _decay(value: Callable[[str], Any]) -> Iterator[Finding]:
    name, decay = value("schedule.name"), value("schedule.decay_steps")
    if name != "wsd" and decay is not None:
        text = f"found {decay}, but only schedule wsd uses it and schedule.name is {name}; remove it"
        yield "schedule.decay_steps", text
    elif name == "wsd" and decay is None:
        yield "schedule.decay_steps", "missing; wsd needs the number of steps of its final decay"


def _long_decay(value: Callable[[str], Any]) -> Iterator[Finding]:
    steps, decay = value("steps"), value("schedule.decay_steps") or 0
    warmup = num_warmup_steps(steps, value("schedule.warmup_steps"), value("schedule.warmup_ratio"))
    is_known = value("epochs") is None
    if is_known and value("schedule.name") == "wsd" and warmup < steps < warmup + decay:  # else see _warmup
        text = f"found {decay}, but with {warmup} warm-up steps that exceeds the run's {steps} steps"
        yield "schedule.decay_steps", f"{text}; use at most {steps - warmup}"


def _best(value: Callable[[str], Any]) -> Iterator[Finding]:
    every, best, evaluated = map(value, ("checkpoint.every_steps", "checkpoint.best", "evaluate.every_steps"))
    if value("checkpoint.every_epochs") or value("evaluate.every_epochs"):
        return
    if best and not every:
        yield "checkpoint.best", f"found {best}, but checkpoint.every_steps is 0; set it to a positive number"
    elif best and (not evaluated or every % evaluated):
        text = (
            f"found {best}, but checkpoint.every_steps is {every}, evaluate.every_steps is {evaluated} and each "
            "checkpoint needs an evaluation; set evaluate.every_steps to a divisor of checkpoint.every_steps"
        )
        yield "checkpoint.best", text


def _measured(value: Callable[[str], Any]) -> Iterator[Finding]:
    best, measured = value("checkpoint.best"), TASKS[value("task")].metrics
    if value("task") == "classify":
        others = ("eval_accuracy", "eval_f1") if value("classify.problem_type") == "regression" else OF_REGRESSION
        measured = [name for name in measured if name not in others]
    if best and best not in measured:
        text = f"found {best}, but task {value('task')} measures {', '.join(measured)}"
        yield "checkpoint.best", f"{text}; use one of these"


def _exported(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("export.checkpoint") == "best" and not value("checkpoint.best"):
        yield "export.checkpoint", "found best, but checkpoint.best names no metric; set it to eval_loss, for example"


def _patience(value: Callable[[str], Any]) -> Iterator[Finding]:
    patience = value("evaluate.patience")
    if patience and not (value("evaluate.every_steps") or value("evaluate.every_epochs")):
        text = f"found {patience}, but there is no evaluation; set evaluate.every_steps or evaluate.every_epochs"
        yield "evaluate.patience", text


def _rollback(value: Callable[[str], Any]) -> Iterator[Finding]:
    ratio = value("numerics.rollback_ratio")
    if ratio is not None and not value("checkpoint.every_steps"):
        text = f"found {ratio:g}, but rollback needs checkpoints and checkpoint.every_steps is 0; set that above 0"
        yield "numerics.rollback_ratio", text


def _evaluate(value: Callable[[str], Any]) -> Iterator[Finding]:
    every, held_out = value("evaluate.every_steps"), value("data.validation_fraction")
    every = every or value("evaluate.every_epochs")
    if every and not held_out and value("evaluate.path") is None and value("evaluate.split") is None:
        unit = "epochs" if value("evaluate.every_epochs") else "steps"
        text = f"found {every:g}, but there is no evaluation data; set data.validation_fraction above 0, or "
        yield f"evaluate.every_{unit}", f"{text}evaluate.path"


def in_steps(recipe: Recipe, num_rows: int, step: int = 0, samples: int = 0) -> Recipe:
    """Return a recipe whose numbers of epochs are numbers of steps, too.

    Args:
        num_rows: the training rows, which are known once the data has been read.
        step, samples: steps of the checkpoint to resume from and rows that they have read, perhaps by another
            batch.global_batch_size.

    Raises:
        ConfigurationError: the schedule does not fit into the steps, or checkpoint.best to its evaluations.
    """
    if not any((recipe.epochs, recipe.evaluate.every_epochs, recipe.checkpoint.every_epochs)):
        return recipe
    steps_per_epoch = num_rows / recipe.batch.global_batch_size

    def every(epochs: float) -> int:
        return max(1, round(epochs * steps_per_epoch))

    evaluate, checkpoint = recipe.evaluate, recipe.checkpoint
    if evaluate.every_epochs:
        evaluate = evaluate.model_copy(update={"every_steps": every(evaluate.every_epochs)})
    if checkpoint.every_epochs:
        saved = every(checkpoint.every_epochs)
        if evaluate.every_epochs and math.isclose(
            times := checkpoint.every_epochs / evaluate.every_epochs, round(times), rel_tol=1e-9
        ):
            saved = round(times) * evaluate.every_steps  # so that checkpoints are evaluated although both are rounded
        checkpoint = checkpoint.model_copy(update={"every_steps": saved})
    # a last digit of the product must not become a step
    steps = recipe.steps
    if recipe.epochs:
        left = (recipe.epochs * num_rows - samples) / recipe.batch.global_batch_size
        steps = max(1, step + math.ceil(round(left, 6)))
    settled = recipe.model_copy(update={"steps": steps, "evaluate": evaluate, "checkpoint": checkpoint})

    def value(key: str) -> Any:
        return None if key.endswith("epochs") else attrgetter(key)(settled)

    findings = [finding for rule in (_warmup, _long_decay, _best) for finding in rule(value)]
    if findings:
        rows = f"{num_rows} rows are {steps_per_epoch:.4g} steps of {recipe.batch.global_batch_size} rows"
        raise ConfigurationError("\n".join(f"{key}: {text}" for key, text in findings) + f"\n{rows}")
    return settled


RULES: tuple[Rule, ...] = (
    *(_no_data, partial(_readable, "data.path"), partial(_readable, "evaluate.path")),
    *(_not_packed, _nothing_truncated),
    *(partial(_of_tasks, key) for key in dict.fromkeys(key for spec in TASKS.values() for key in spec.reads)),
    *(_classes, _messages_without_template, _reasoning),
    *(_whole_conversations, _problem_type, _token_weights, _token_weights_of_liger, _template, _template_date),
    *(partial(_one_kind_of_row, f"data.{column}_column") for column in ("prompt", "completion")),
    *(
        _epochs,
        _warmup,
        _two_warmups,
        _decay,
        _long_decay,
        _best,
        _measured,
        _exported,
        _patience,
        _rollback,
        _evaluate,
    ),
)
