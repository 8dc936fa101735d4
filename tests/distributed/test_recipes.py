"""Every file in recipes/ on a user's own file, made small: it trains, and has the same curve under every strategy.

`data.path` is the one key of the data that is given; all else makes the run short.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from harness import ROOT, Run, largest_relative_difference, launch_command, long
from task_columns import unread

from samecurve.config.loader import read_recipe

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in ("base", "tiny"))
STRATEGIES = ["ddp", "fsdp", "zero2", "zero3"]
STEPS, ROWS = 4, 8
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_FAMILY = {
    "llama": {"num_key_value_heads": 2, "max_position_embeddings": 128},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 128},
    "bert": {"max_position_embeddings": 128},  # with its default dropout
}
PRETRAINED = {"continue_pretrain": "pretrain", "lora": "sft", "qlora": "sft", "distill": "sft"}
SETTINGS = (
    f"steps={STEPS}",
    f"batch.global_batch_size={ROWS}",
    "batch.sequence_length=64",
    "data.validation_fraction=0.2",
    "evaluate.every_steps=2",
    "schedule.warmup_steps=1",
    "precision=fp32",
)


@pytest.fixture(scope="module")
def file(workspace) -> Path:
    """Rows that any task can read; the words differ, so that every sentence is another one."""
    draw = random.Random(1)

    def sentence(word: str) -> str:
        return " ".join([word, *draw.choices(("red", "green", "blue", "fast", "slow", "old"), k=draw.randint(2, 7))])

    rows = []
    for number in range(120):
        text = sentence(f"thing {number} is")
        pair = {"chosen": text, "rejected": sentence(f"nothing {number}")}
        fits = {"anchor": f"what is {number}?", "positive": text}
        words = text.split()
        fits |= {"tokens": words, "tags": ["number" if word.isdigit() else word[0] for word in words]}
        fits |= {"completions": words, "labels": [bool(len(word) % 2) for word in words]}
        rows.append({"prompt": f"say {number}", "completion": text, "text": text, "label": number % 3, **pair, **fits})
    path = workspace.folder / "anything.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@cache
def started(workspace, file: Path, recipe: str, strategy: str | None, verify: str = "off") -> Run:
    value = read_recipe(str(ROOT / "recipes" / f"{recipe}.yaml")).value
    directory = workspace.folder / f"recipe_{recipe}_{strategy}_{verify}"
    model = [f"tokenizer.vocabulary_size={300 if value('tokenizer.vocabulary_size') else 'null'}"]
    if recipe in PRETRAINED:
        base = started(workspace, file, PRETRAINED[recipe], None).directory / "model"
        model += [f"model.path={base}", *([f"distill.teacher={base}"] if recipe == "distill" else [])]
    else:
        sizes = SMALL | OF_FAMILY[value("model.config")["model_type"]]
        model += [f"model.config.{key}={value}" for key, value in sizes.items()]
    micro = f"batch.micro_batch_size={4 if strategy is None else 2}"
    path = None if strategy is None else workspace.strategy(strategy)
    command = launch_command("fork", path, 1 if strategy is None else 2, workspace.folder)
    command += [str(ROOT / "recipes" / f"{recipe}.yaml"), f"output_dir={directory}", f"data.path={file}"]
    columns = json.loads(file.read_text().partition("\n")[0])
    command += [f"data.ignore_columns=[{','.join(unread(value('task'), columns))}]"]
    command += ["data.label_column=tags"] if recipe == "token_classify" else []
    command += [*SETTINGS, f"export.verify={verify}", micro, *model, *(["--strategy", str(path)] if path else [])]
    run = workspace.execute(command, directory)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == (strategy or "single")
    assert run.facts["recipe"]["data"]["path"] == str(file)
    assert run.column("step") == list(range(1, STEPS + 1))
    assert all(0 < mfu <= hfu <= 1 for mfu, hfu in zip(run.column("mfu"), run.column("hfu"), strict=True))
    return run


# every day one recipe under each strategy; the tasks have tests of their own under other strategies
EVERY_DAY = [("classify", "ddp"), ("continue_pretrain", "fsdp"), ("mlm", "zero2"), ("moe", "zero3")]
CASES = [(recipe, strategy) for recipe in RECIPES for strategy in STRATEGIES]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe, workspace, file):
    if recipe == "qlora":
        pytest.importorskip("bitsandbytes")
    started(workspace, file, recipe, None)


@pytest.mark.parametrize(
    ("recipe", "strategy"), [*EVERY_DAY, *long(*(case for case in CASES if case not in EVERY_DAY))]
)
def test_the_same_curve_under_every_strategy(recipe, strategy, workspace, file):
    if recipe == "qlora":
        pytest.importorskip("bitsandbytes")
    expected, run = started(workspace, file, recipe, None), started(workspace, file, recipe, strategy)
    assert run.facts["gradient_accumulation_steps"] == expected.facts["gradient_accumulation_steps"] == 2
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    held_out = [[record["eval_loss"] for record in each.metrics if "eval_loss" in record] for each in (run, expected)]
    assert len(held_out[0]) == 2 and largest_relative_difference(*held_out) < 1e-5


def test_all_recipes_are_here():
    assert len(RECIPES) >= 12 and set(PRETRAINED) < set(RECIPES)
    assert {strategy for _, strategy in EVERY_DAY} == set(STRATEGIES) and set(EVERY_DAY) < set(CASES)
