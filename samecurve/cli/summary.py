"""Summarize a run: its state, loss and speed, and the commands to view, continue and share it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from samecurve.config.inheritance import latest_overrides
from samecurve.errors import ConfigurationError
from samecurve.metrics.console import duration, number, of_session, spaced
from samecurve.reports.history import History
from samecurve.run.sessions import RUN_FACTS
from samecurve.run.status import STATUS, read_status, refused_text
from samecurve.specs.environment import train_script
from samecurve.specs.tasks import TASKS
from samecurve.storage.records import read_record
from samecurve.strategy.placement import REFERENCE, another_strategy, num_processes_again
from samecurve.strategy.resolve import strategy_path

LABEL_WIDTH = 14
_FACTS = RUN_FACTS | {
    **{key: str for key in ("strategy", "engine", "precision", "recipe_path")},
    "strategy_path": (Path, None),
    "world_size": range(1, 2**31),
    "overrides": [str],
    "recipe?": {"task?": str, "model?": dict, "data?": dict},
}
# keys for which `compare` has its own values
LENGTH = ("output_dir", "steps", "epochs", "schedule", "evaluate.every_steps", "evaluate.every_epochs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")


def run(arguments: argparse.Namespace) -> int:
    directory = arguments.run
    record = read_record(directory / "run.json", _FACTS)
    history = History.read(directory, (record.value or {}).get("start_step", 0))
    if record.is_absent or not history.num_steps:
        raise ConfigurationError(f"{directory}: no run with a finished step here (run.json, metrics.jsonl)")
    facts = record.require(ConfigurationError, f"python -m samecurve report {quoted(directory)} shows what can be read")
    status = read_status(directory / STATUS)
    for label, text in [*_results(facts, history, status), ("run directory", directory)]:
        print(f"{label:<{LABEL_WIDTH}}{text}")
    for purpose, line in commands(directory, facts):
        print(f"\n{purpose}:\n  {line}")
    return 0


def _results(facts: dict, history: History, status: dict) -> Iterator[tuple[str, str]]:
    state, reason = status.get("state", "unknown"), status.get("reason")
    yield "state", f"{state}: {reason}" if reason else state
    refused = refused_text(status)
    if refused:
        yield "refused start", refused.replace("\n", f"\n{'':<{LABEL_WIDTH}}")
    processes = "1 process" if facts["world_size"] == 1 else f"{facts['world_size']} processes"
    yield "strategy", f"{facts['strategy']} ({facts['engine']}), {processes}, {facts['precision']}"
    if "loss" in history.ends:
        yield "loss", "{:.4f} -> {:.4f}".format(*history.ends["loss"]) + f" in {history.num_steps:,} steps"
    evaluated = [record for record in history.evaluations if record["eval_loss"] is not None]
    if evaluated:
        # every number of the last evaluation, and the loss of the first one if there are several
        last = {spaced(name.removeprefix("eval_")): value for name, value in evaluated[-1].items() if "eval_" in name}
        before = f"{evaluated[0]['eval_loss']:.4f} -> " if len(evaluated) > 1 else ""
        texts = [f"{name} {before if name == 'loss' else ''}{number(value)}" for name, value in last.items()]
        yield "held out", f"{', '.join(texts)} (after step {evaluated[-1]['step']})"
    counts, totals = facts.get("counts", "tokens"), history.totals
    seconds = totals.get("step_seconds", 0)
    if not seconds:
        return
    counted = totals.get("tokens", 0)
    rate = f"{counted / seconds:,.0f} per second"
    if counts != "tokens":
        rate = f"{counted / seconds:,.1f} per second, {totals.get('input_tokens', 0) / seconds:,.0f} tokens per second"
    yield counts, f"{counted:,} trained in {duration(seconds)} of steps, {rate}"
    for name, text in of_session(facts, history.session).items():
        yield name.partition(",")[0], text


def commands(directory: Path, facts: dict) -> list[tuple[str, str]]:
    """List (purpose, command). New runs get a new output_dir; otherwise the earlier run's files would be moved."""
    recipe, world_size = facts["recipe_path"], facts["world_size"]
    overrides = latest_overrides(facts["overrides"])
    listed = [("view the curves", f"tensorboard --logdir {quoted(directory / 'tensorboard')}")]
    listed.append(("write a report", f"python -m samecurve report {quoted(directory)}"))
    if any((directory / "checkpoints").glob("step_*")) and read_status(directory / STATUS).get("state") != "done":
        listed.append(("resume the run", launch(facts["strategy_path"], world_size, [recipe, *overrides])))
    if (directory / "model").is_dir():
        trained = facts.get("recipe", {})
        has_new_head = bool(trained.get("model", {}).get("new_head"))
        model, weights = "model", "its weights"
        name = trained.get("task", "")
        task = TASKS[name] if name in TASKS else None
        if task and task.predicts:
            use = "run the model", f"python -m samecurve predict {quoted(directory)} {task.predicts}"
        elif task and task.chats and trained.get("data", {}).get("chat"):
            use = "chat with the model", f"python -m samecurve chat {quoted(directory)}"
        else:
            use = "generate text", f"python -m samecurve generate {quoted(directory)}"
        listed.append(use)
        listed.append(("export the model", f"python -m samecurve export {quoted(directory)} --dtype bf16"))
        schema = {"base_model_name_or_path?": (str, None)}
        adapter = read_record(directory / "model" / "adapter_config.json", schema).value or {}
        if base := adapter.get("base_model_name_or_path"):
            model, weights = "merged", "the merged weights"
            if not (directory / model).is_dir():
                listed.append((f"merge the adapter into {base}", f"python -m samecurve merge {quoted(directory)}"))
        started = continued(overrides, directory, has_new_head, model)
        listed.append((f"start a run from {weights}", launch(facts["strategy_path"], world_size, [recipe, *started])))
    other = another_strategy(facts["strategy"])
    again = [recipe, *_without(overrides, ("output_dir",)), f"output_dir={directory}-{other}"]
    processes = num_processes_again(world_size)
    listed.append(("try another strategy", launch(strategy_path(other), processes, again)))
    compared = f"{_typed([recipe, *_without(overrides, LENGTH)])} --strategies {REFERENCE},{other}"
    counted = f" --num_processes {processes}" if processes else ""
    listed.append(("compare the strategies", f"python -m samecurve compare {compared}{counted}"))
    return listed


def launch(strategy: str | None, world_size: int | None, arguments: Sequence[str]) -> str:
    """Build the command that starts train.py. world_size: None uses the strategy file's own number."""
    typed = _typed(arguments)
    if strategy is None:
        return f"python {train_script()} {typed}"
    if strategy.endswith(".json"):  # a DeepSpeed JSON is no config file of accelerate launch
        return f"torchrun --nproc_per_node {world_size} {train_script()} {typed} --strategy {quoted(strategy)}"
    processes = f"--num_processes {world_size} " if world_size else ""
    return f"accelerate launch --config_file {quoted(strategy)} {processes}{train_script()} {typed}"


def continued(overrides: Sequence[str], directory: Path, has_new_head: bool = False, model: str = "model") -> list[str]:
    """Build the overrides of a run that starts from weights and tokenizer of a folder in the run's, in a new one."""
    kept = _without(overrides, ("output_dir", "model.path", "model.config", "model.new_head", "tokenizer"))
    head = ["model.new_head=false"] if has_new_head else []  # the export already contains the head
    new = [f"model.path={directory / model}", *head, "tokenizer.path=null", f"output_dir={directory}-continued"]
    return [*kept, *new]


def _without(overrides: Sequence[str], keys: tuple[str, ...]) -> list[str]:
    dotted = [(override.partition("=")[0], override) for override in overrides]
    return [
        override
        for key, override in dotted
        if not any(key == section or key.startswith(f"{section}.") for section in keys)
    ]


def _typed(arguments: Sequence[str]) -> str:
    return " ".join(quoted(argument) for argument in arguments)


def quoted(text: object) -> str:
    return shlex.quote(str(text))
