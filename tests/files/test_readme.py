"""The README says what is there: files, strategies, recipes, commands and the names of the metrics."""

from __future__ import annotations

import ast
import re
import shlex
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from samecurve import cli, recipe
from samecurve.cli import bench
from samecurve.compilation import Recompilations
from samecurve.engines.base import EvalResult, StepResult
from samecurve.engines.keys import ACCELERATE, Refused
from samecurve.engines.keys_deepspeed import DEEPSPEED, ZERO
from samecurve.engines.resolve import command_line
from samecurve.meter import Machine, Meter
from samecurve.tasks.causal import CausalTask

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LAUNCHERS = ("accelerate launch", "torchrun", "deepspeed", "python", "bash")
LINES = [line.removeprefix("$ ") for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [line for line in LINES if line.startswith(LAUNCHERS)]


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]


def first_column(text: str) -> set[str]:
    """The names in backticks that table rows begin with, without the header."""
    return set(re.findall(r"^\| \[?`([\w.]+)`\]?(?:\([^)]*\))? \|", text, re.MULTILINE)) - {"configs"}


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"\b(?:[A-Z]+_)+(?:EXAMPLE|TABLE)\b|\b(?:TODO|TBD|FIXME|XXX)\b", README) == []


def test_linked_files_exist():
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert len(targets) > 5
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_every_strategy_and_every_recipe_is_in_its_table():
    strategies = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")} - {"base", "tiny"}
    assert len(strategies) >= 12 and len(recipes) >= 2
    assert first_column(section("Strategies")) == strategies
    assert first_column(section("Recipes")) == recipes


def test_keys_of_strategy_files_are_keys():
    table = section("Strategies").partition("| file | key |")[2].partition("\n\n")[0]
    keys = set(re.findall(r"^\|[^`|]*\| `(\w+)", table, re.MULTILINE))
    assert len(keys) == 9 and keys <= ACCELERATE["fsdp_config"].keys() | DEEPSPEED.keys() | ZERO.keys()
    assert not any(isinstance({**ACCELERATE["fsdp_config"], **DEEPSPEED, **ZERO}[key], Refused) for key in keys)


def test_the_table_says_which_recipes_take_an_adapter():
    rows = re.findall(r"^\| \[`(\w+)`\].*\|([^|]*)\|$", section("Recipes"), re.MULTILINE)
    told = {name for name, adapter in rows if "LoRA" in adapter}
    pretrained = ["model={path: owner/name}", "tokenizer.vocabulary_size=null", "adapter.name=lora"]
    taken = set()
    for name, _ in rows:
        source = recipe.load(str(ROOT / "recipes" / f"{name}.yaml"), pretrained)
        taken |= set() if [problem for problem in source.document.problems if problem.key == "adapter.name"] else {name}
    # the quickstart is there to need no pretrained model
    assert told == taken - {"quickstart"} and len(told) >= 11


def test_the_ways_to_start_are_all_there():
    assert {start for start in LAUNCHERS for line in COMMANDS if line.startswith(start)} == set(LAUNCHERS)


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_a_command_can_be_typed_here(line):
    words = shlex.split(line, comments=True)
    folders = ("configs/", "ds_configs/", "recipes/", "scripts/", "train.py")
    assert [word for word in words if word.startswith(folders) and not (ROOT / word).exists()] == []
    if "train.py" in words:
        parsed = command_line().parse_intermixed_args(words[words.index("train.py") + 1 :])
        assert parsed.recipe.startswith("recipes/")
        assert all("=" in override for override in parsed.overrides)
    elif "samecurve" in words:
        command, *arguments = words[words.index("samecurve") + 1 :]
        assert words[words.index("samecurve") - 1] == "-m" and command in cli.COMMANDS
        if command == "bench":
            assert arguments[0] in bench.COMMANDS
            parser = ArgumentParser()
            import_module(f"samecurve.cli.bench.{arguments[0]}").add_arguments(parser)
            parser.parse_intermixed_args(arguments[1:])
    else:
        assert words[0] == "bash" and words[1].startswith("scripts/")


def test_every_metric_is_named_and_no_other():
    paragraph = re.search(r"^`metrics\.jsonl`: (.*?)\n\n", README, re.MULTILINE | re.DOTALL)[1]
    names = re.findall(r"`(\w+)`", paragraph)
    assert sorted(names) == sorted(recorded())


def recorded() -> list[str]:
    """What a run's records hold: the meter's, what train.py adds, the evaluation's."""
    meter = Meter(None, Machine(1, None, lambda: 0))
    record = meter.step(1, StepResult(loss=1.0, grad_norm=1.0, tokens=1, applied=True), 1e-3, 8, 0.0)
    loop = ast.walk(ast.parse((ROOT / "train.py").read_text()))
    added = [key.value for node in loop if isinstance(node, ast.Dict) for key in node.keys]
    added += ["save_stall_seconds", "save_seconds", *Recompilations(True, print).record(1)]
    task = CausalTask(tokenizer=None, train=None, held_out=SimpleNamespace(num_targets=1))
    task.__dict__["_held_out_bytes"] = 4
    metrics = [*task.metrics(EvalResult(loss=1.0, tokens=1)), "eval_accuracy", "eval_f1", "eval_rows"]
    metrics += ["eval_rewards_chosen", "eval_rewards_rejected", "eval_margin", "eval_pairs", "eval_loss_source_0"]
    metrics += ["rewards_chosen", "rewards_rejected", "margin", "accuracy"]
    metrics += ["eval_label_loss", "eval_divergence"]
    metrics += ["eval_accuracy_at_1", "eval_accuracy_at_5", "eval_mrr_at_10"]
    return [*record, *added, *metrics]
