"""README.md and docs/ name what is there: strategies, recipes, optimizers, exit codes, metrics, commands."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, names, section, tables, text
from test_optimizers import BYTES

from samecurve import errors
from samecurve.cli import commands
from samecurve.config import loader
from samecurve.interfaces.engine import StepResult
from samecurve.metrics.meter import Machine, Meter
from samecurve.models.compilation import Recompilations
from samecurve.specs.model_families import families
from samecurve.specs.optimizers import OPTIMIZERS, usual_rates
from samecurve.specs.tasks import TASKS
from samecurve.strategy.accelerate_keys import ACCELERATE, Rejected
from samecurve.strategy.deepspeed_keys import DEEPSPEED, ZERO
from samecurve.strategy.resolve import command_line

LAUNCHERS = ("accelerate launch", "torchrun", "deepspeed", "python", "bash")


def commands_of(page: str) -> list[str]:
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith((*LAUNCHERS, "samecurve "))]


def first_column(markdown: str) -> list[str]:
    """The first name in backticks of each row of a text's first table; "" where there is none."""
    return [next(iter(names(row[0])), "") for row in tables(markdown)[0]]


def test_the_readme_fits_on_a_page():
    assert len(text("README.md").splitlines()) <= 200


def test_nothing_is_left_to_fill_in():
    assert len(PAGES) >= 15
    for name in PAGES:
        assert re.findall(r"\b(?:[A-Z]+_)+(?:EXAMPLE|TABLE)\b|\b(?:TODO|TBD|FIXME|XXX)\b", text(name)) == [], name


def test_every_strategy_is_in_the_table():
    strategies = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert len(strategies) >= 12
    assert sorted(first_column(text("docs/strategies.md"))) == strategies


def test_strategies_and_pairs_of_the_readme():
    page = text("README.md")
    strategies = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    named = [names(row[0])[0] for row in tables(section("README.md", "Several devices"))[0]]
    assert len(named) == 6 and set(named) <= strategies and f"has all {len(strategies)}:" in page
    _, *cells = zip(*tables(text("docs/equal_curves.md"))[0][:-1], strict=True)
    results = [cell for column in cells[1:-1] for cell in column]
    ran = [cell for cell in results if not cell.startswith("(")]
    claim = (
        rf"Of the {len(results)} pairs of the recipes below with a strategy, \[{len(ran)} run and follow one curve\]"
    )
    assert re.search(claim.replace(" ", r"\s+"), page)


@pytest.mark.parametrize("page", ["README.md", "docs/finetuning.md"])
def test_every_recipe_is_in_the_table(page):
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")} - {"base", "tiny"}
    assert len(recipes) >= 12
    assert sorted(first_column(section(page, "Recipes"))) == sorted(recipes)


def test_keys_of_strategy_files_are_keys():
    (table,) = tables(section("docs/strategies.md", "Sharding keys"))
    keys = {re.match(r"\w+", names(row[1])[0])[0] for row in table}
    assert len(keys) == len(table) >= 9
    assert keys <= ACCELERATE["fsdp_config"].keys() | DEEPSPEED.keys() | ZERO.keys()
    assert not any(isinstance({**ACCELERATE["fsdp_config"], **DEEPSPEED, **ZERO}[key], Rejected) for key in keys)


def test_the_table_says_which_recipes_take_an_adapter():
    rows = {names(row[0])[0]: row[-1] for row in tables(section("docs/finetuning.md", "Recipes"))[0]}
    claimed = {name for name, adapter in rows.items() if "LoRA" in adapter}
    pretrained = ["model={path: owner/name}", "tokenizer.vocabulary_size=null", "adapter.name=lora"]
    taken = set()
    for name in rows:
        source = loader.read_recipe(str(ROOT / "recipes" / f"{name}.yaml"), pretrained)
        taken |= set() if [problem for problem in source.document.problems if problem.key == "adapter.name"] else {name}
    # the quickstart is there to need no pretrained model
    assert claimed == taken - {"quickstart"} and len(claimed) >= 11


def test_the_table_of_optimizers_has_their_bytes():
    (table,) = tables(text("docs/optimizers.md"))
    found = {}
    for cell, _, size, _ in table:
        name, *more = names(cell)
        assert float(size.split()[0]) == BYTES[name] + 2 * bool(more), cell
        found[name] = size
    assert found.keys() == OPTIMIZERS.keys() and len(table) == len(found) + 1


def test_the_table_of_learning_rates_is_that_of_the_header():
    (table,) = tables(section("docs/finetuning.md", "Learning rates"))
    found = {task: cells for first, *cells in table for task in names(first)}
    assert found == {task: [usual_rates(task, adapted, "adamw") for adapted in (False, True)] for task in TASKS}


def test_the_table_of_exit_codes_is_that_of_the_errors():
    table = tables(section("docs/failures.md", "Exit codes"))[0]
    classes = [each for each in vars(errors).values() if isinstance(each, type) and "exit_code" in vars(each)]
    codes = {each.exit_code for each in classes if each is not errors.SamecurveError}
    assert {int(row[0]) for row in table} == codes and len(table) >= 9


def test_liger_has_so_many_families():
    assert f"for the {len(families('liger'))} families" in text("docs/memory_and_speed.md")


def test_the_error_report_is_that_of_the_program(tmp_path):
    """The example is made again: its mistakes stand in the lines that it names."""
    recipe = ["task: pretrain", "output_dir: runs/bad", "steps: 20", "precision: fp32", "model:"]
    recipe += ["  config: {model_type: llama}", "tokenizer: {vocabulary_size: 300}", "data:"]
    recipe += ["  path: builtin:python-stdlib"]
    recipe += ["batch: {micro_batch_sise: 4, global_batch_size: 8, sequence_length: 64}"]
    recipe += ["optimizer: {learning_rate: 1.0e-3}", "schedule:", "  warmup_steps: 50"]
    (tmp_path / "bad.yaml").write_text("\n".join(recipe))
    strategy = ["{", '"train_micro_batch_size_per_gpu": "auto",', '"zero_optimization": {"stage": 2},']
    (tmp_path / "zero2.json").write_text("\n".join([*strategy, '"gradient_cliping": 1.0}']))
    command = [sys.executable, ROOT / "train.py", "bad.yaml", "--strategy", "zero2.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    for page in ("README.md", "docs/failures.md"):
        assert done.stderr.strip() in [block.strip() for block in blocks(page)], page


def test_the_ways_to_start_are_all_there():
    started = {start for start in LAUNCHERS for line in commands_of("README.md") if line.startswith(start)}
    assert started == set(LAUNCHERS)


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in commands_of(page)}))
def test_a_command_can_be_typed_here(line):
    words = shlex.split(line, comments=True)
    if words[:3] == ["python3", "-m", "venv"]:
        return
    folders = ("configs/", "ds_configs/", "examples/", "recipes/", "scripts/", "train.py")
    assert [word for word in words if word.startswith(folders) and not (ROOT / word).exists()] == []
    train = next((word for word in ("train.py", "samecurve.train") if word in words), "")
    if train:
        parsed = command_line().parse_intermixed_args(words[words.index(train) + 1 :])
        assert parsed.recipe.startswith("recipes/") or (train, parsed.recipe) == ("samecurve.train", "mine.yaml")
        check_recipe(train, parsed)
    elif "samecurve" in words:
        command, *arguments = words[words.index("samecurve") + 1 :]
        assert "samecurve" in (words[0], words[words.index("-m") + 1] if "-m" in words else "")
        assert command in commands.COMMANDS
        module = f"samecurve.cli.{command}"
        if command == "bench":
            subcommand, *arguments = arguments
            assert subcommand in commands.BENCH_COMMANDS
            module += f".{subcommand}"
        parser = ArgumentParser()
        import_module(module).add_arguments(parser)
        check_recipe(command, parser.parse_intermixed_args([word.strip("[]") for word in arguments]))
    elif scripts := [word for word in words if word.endswith(".py")]:
        assert all(script.startswith(("examples/", "scripts/")) for script in scripts)
    else:
        assert words[0] == "bash" and words[1].startswith("scripts/")


def check_recipe(command: str, parsed: Namespace) -> None:
    """The command's recipe is whole with the keys that are given: a reader has the data, and what a store needs."""
    recipe, overrides = getattr(parsed, "recipe", None), getattr(parsed, "overrides", ())
    if not (recipe and (ROOT / recipe).is_file()):
        return
    if command == "sweep":
        overrides = [override.partition(",")[0] for override in overrides]
    problems = [str(problem) for problem in loader.read_recipe(str(ROOT / recipe), overrides).document.problems]
    absent = re.compile(r"no such file or folder|the package \w+ is not installed")
    assert [problem for problem in problems if not absent.search(problem)] == [], command


def test_every_command_is_in_the_pages():
    lines = [shlex.split(line, comments=True) for page in PAGES for line in commands_of(page)]
    used = {words[words.index("samecurve") + 1] for words in lines if "samecurve" in words}
    assert used == set(commands.COMMANDS)
    assert {words[words.index("bench") + 1] for words in lines if "bench" in words} == set(commands.BENCH_COMMANDS)


def test_every_metric_is_named_and_no_other():
    rows = [row for table in tables(section("docs/run_directory.md", "metrics.jsonl")) for row in table]
    fields = [name for row in rows for name in names(row[0])]
    assert sorted(fields) == sorted(recorded())


def keys(path: Path) -> list[ast.Constant]:
    """The keys of a file's dictionaries that are written out."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    return [key for key in found if isinstance(key, ast.Constant)]


def recorded() -> list[str]:
    """What a run's records hold: the meter's, what train.py adds, the evaluation's."""
    meter = Meter(None, Machine(1, None, lambda: 0))
    record = meter.step(1, StepResult(loss=1.0, grad_norm=1.0, tokens=1, applied=True), 1e-3, 8, 0.0)
    added = [key.value for key in keys(ROOT / "train.py")]
    added += ["save_stall_seconds", "save_seconds", *Recompilations(True, print).record(1)]
    written = {key.value for path in (ROOT / "samecurve" / "tasks").glob("*.py") for key in keys(path)}
    metrics = [name for name in written if str(name).startswith("eval_")]
    metrics += ["eval_rewards_chosen", "eval_rewards_rejected", "eval_margin", "eval_pairs", "eval_answers"]
    metrics += ["eval_loss_source_0", "eval_mrr_at_10"]
    metrics += ["rewards_chosen", "rewards_rejected", "margin", "accuracy"]
    metrics += ["router_loss", "router_z_loss", "expert_share", "expert_share_max"]
    return [*record, *added, *metrics]
