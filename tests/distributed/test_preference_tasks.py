"""dpo and reward under every kind of strategy, against a loop written with transformers and torch alone.

The loop reads the file, renders the chats and tokenises them itself; samecurve is asked which rows a step reads.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import LLAMA, largest_relative_difference, long, relative_l2
from test_pipeline_schedules import ENGINES as SCHEDULES
from test_plain_loop import train
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from samecurve.cli import commands
from samecurve.config import loader
from samecurve.data.batches import StepBatches
from samecurve.tasks import registry

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, SAVED, LENGTH, BETA = 10, 5, 64, 0.2
AUTO = {"dpo": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}
CUT_ROWS = ("fsdp_cp", "fsdp_ulysses", "fsdp_tp_cp")
ENGINES = {"single": "{}", "ddp": "DistributedDataParallel", "fsdp": "FSDP{}", "tp": "{}", "pipeline": "PipelineEngine"}
ENGINES |= {**SCHEDULES, "pp_fsdp_tp": "Schedule1F1B", **dict.fromkeys(CUT_ROWS, "FSDP{}")}
WORLDS = {"single": 1, "fsdp_tp_cp": 4, "pp_fsdp_tp": 8}
MODELS = {"dpo": "LlamaForCausalLM", "reward": "LlamaForSequenceClassification"}


@dataclass(frozen=True)
class Setting:
    """One task: what a run is started with, and what the plain loop found."""

    overrides: tuple[str, ...]
    folder: Path
    losses: list[float]
    margins: list[float]
    norms: list[float]
    weights: dict


@pytest.fixture(scope="module")
def files(workspace) -> dict[str, Path]:
    """Answers of very different lengths, some too long for a row; 19 pairs to evaluate on, which no batch divides."""
    draw = random.Random(4)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 4))) for _ in range(40)]

    def say(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    found = {}
    for name, count in (("train", 100), ("held_out", 19)):
        found[name] = workspace.folder / f"pairs_{name}.jsonl"
        rows = [{"prompt": say(5), "chosen": say(12) + " yes", "rejected": say(30) + " no"} for _ in range(count)]
        found[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture(scope="module")
def settings(workspace, files) -> dict[str, Setting]:
    return {task: setting(workspace, files, task) for task in MODELS}


def setting(workspace, files, task: str) -> Setting:
    """The model and its tokenizer are on the disk as transformers writes them."""
    common = [f"task={task}", f"steps={STEPS}", f"checkpoint.every_steps={SAVED}", f"data.path={files['train']}"]
    common += [f"data.cache_dir={workspace.folder / 'cache'}", "data.packing=false", "data.validation_fraction=0"]
    common += [f"evaluate={{path: {files['held_out']}, every_steps: {STEPS}}}"]
    common += [f"batch.sequence_length={LENGTH}", "batch.micro_batch_size=2"]
    common += [f"dpo.beta={BETA}"] if task == "dpo" else []
    loaded = registry.load_task(loader.read_recipe(str(workspace.recipe), common).recipe)
    assert loaded.train.num_dropped == 0 < loaded.train.num_truncated
    tokenizer, fields = loaded.tokenizer, dict(LLAMA)
    config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=len(tokenizer), **fields)
    if task == "reward":
        config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    torch.manual_seed(1)
    folder = workspace.folder / f"llama_{task}"
    AUTO[task].from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    overrides = (*common, f"model={{path: {folder}}}", f"tokenizer={{path: {folder}}}")
    return Setting(overrides, folder, *plain_loop(workspace, files, task, folder, overrides))


def plain_loop(workspace, files, task, folder, overrides):
    found = loader.read_recipe(str(workspace.recipe), overrides).recipe
    model, reference = (AUTO[task].from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    batches = StepBatches(registry.load_task(found).train, found.seed, found.batch, (0, 1), STEPS)
    texts = [json.loads(line) for line in files["train"].read_text().splitlines()]
    margins = []

    def steps():
        for step in range(STEPS):
            rewards = rewards_of(task, folder, model, reference, [texts[index] for index in batches.rows_of(step)])
            margins.append((rewards[:, 0] - rewards[:, 1]).mean().item())
            yield -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()

    losses, norms = train(model, steps(), STEPS)
    return losses, margins, norms, {name: p.detach() for name, p in model.named_parameters()}


def rewards_of(task, folder, model, reference, rows) -> torch.Tensor:
    """(pairs, 2)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        for which in ("chosen", "rejected"):
            prompt = [{"role": "user", "content": row["prompt"]}]
            asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            whole = [*prompt, {"role": "assistant", "content": row[which]}]
            text = tokenizer.apply_chat_template(whole, tokenize=False)
            assert text.startswith(asked)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            if task == "reward":
                found.append(model(ids[:, :LENGTH]).logits[0, 0])
                continue
            first = len(tokenizer(asked, add_special_tokens=False)["input_ids"])
            ids = ids[:, :-1][:, : LENGTH + 1]  # without the line break behind the end of the turn
            answers = (log_probability(model, ids, first), log_probability(reference, ids, first).detach())
            found.append(BETA * (answers[0] - answers[1]))
    return torch.stack(found).view(-1, 2)


def log_probability(model, ids, first) -> torch.Tensor:
    steps = model(ids).logits.log_softmax(dim=-1)[0, first - 1 : -1]
    return steps.gather(-1, ids[0, first:, None]).sum()


EVERY_DAY = [("dpo", "zero3"), ("dpo", "pipeline_1f1b"), ("reward", "fsdp_cp")]
CASES = EVERY_DAY + long(
    ("dpo", "single"),
    ("dpo", "tp"),
    ("reward", "fsdp"),
    *(
        ("dpo", name)
        for name in ("ddp", "fsdp", "zero2", "pipeline", *CUT_ROWS, *SCHEDULES, "pp_fsdp_tp")
        if name != "pipeline_1f1b"
    ),
    *(("reward", name) for name in ("single", "ddp", "zero2", "zero3", "tp", "fsdp_ulysses", "fsdp_tp_cp")),
    *(("reward", name) for name in SCHEDULES),
)


@pytest.mark.parametrize(("task", "strategy"), CASES)
def test_follows_the_plain_loop(task, strategy, workspace, files, settings):
    expected = settings[task]
    run = start(workspace, strategy, *expected.overrides)
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == WORLDS.get(strategy, 2)
    assert run.facts["engine"] == ENGINES.get(strategy, "DeepSpeedEngine").format(MODELS[task])
    in_chunks = task == "dpo" and strategy != "pipeline"  # DeepSpeed's
    assert run.facts["loss_implementation"] == ("chunked" if in_chunks else "full")
    assert set(run.column("tokens")) == {8}
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.norms) < 1e-4
    assert run.column("margin") == pytest.approx(expected.margins, rel=1e-3, abs=1e-5)
    for record in run.metrics:
        assert record["margin"] == pytest.approx(record["rewards_chosen"] - record["rewards_rejected"])
        assert record["accuracy"] * 8 == pytest.approx(round(record["accuracy"] * 8))
        assert record["tokens_per_second"] * record["step_seconds"] > 8 * 2 * 10  # tokens, and not the 8 pairs
    assert relative_l2(run.weights, expected.weights) < 1e-4
    check_evaluation(task, run, files, expected)


@pytest.mark.parametrize("grouped", long(False, True))
def test_a_reward_of_divided_rows_is_that_of_the_last_token(grouped, workspace, settings):
    """Of rows that the number of chunks does not divide, and whose last token any of the ring's ranks may have."""
    overrides = (*settings["reward"].overrides, "batch.sequence_length=59", f"data.group_by_length={grouped}".lower())
    alone = start(workspace, "single", *overrides)
    run = workspace.run(workspace.ring, 4, *overrides)
    assert run.returncode == 0, run.output
    assert (run.facts["context_parallel_size"], run.facts["context_parallel"]) == (2, "ring")
    assert largest_relative_difference(run.column("loss"), alone.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), alone.column("grad_norm")) < 1e-4
    assert relative_l2(run.weights, alone.weights) < 1e-4
    for key in ("eval_loss", "eval_margin", "eval_accuracy"):
        assert run.metrics[-1][key] == pytest.approx(alone.metrics[-1][key], rel=1e-4), key


def start(workspace, strategy: str, *overrides: str):
    run = workspace.run(None if strategy == "single" else strategy, WORLDS.get(strategy, 2), *overrides)
    assert run.returncode == 0, run.output
    return run


def check_evaluation(task, run, files, expected) -> None:
    """The export has the metrics of the run: counted here one pair at a time."""
    rows = [json.loads(line) for line in files["held_out"].read_text().splitlines()]
    model, reference = (
        AUTO[task].from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (run.directory / "model", expected.folder)
    )
    assert type(model).__name__ == MODELS[task] and (task == "dpo" or model.num_labels == 1)
    with torch.no_grad():
        rewards = rewards_of(task, run.directory / "model", model, reference, rows)
    measured = run.metrics[-1]
    assert measured["eval_pairs"] == len(rows) == 19
    assert measured["eval_accuracy"] == pytest.approx((rewards[:, 0] > rewards[:, 1]).float().mean().item())
    assert measured["eval_rewards_chosen"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-4, abs=1e-5)
    assert measured["eval_margin"] == pytest.approx((rewards[:, 0] - rewards[:, 1]).mean().item(), rel=1e-4, abs=1e-5)
    loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean().item()
    assert measured["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_goes_on_under_another_strategy_with_the_same_reference(workspace, settings):
    """Also where the cache is gone: the reference is the model that the run began with, not the one it has now."""
    expected, cache = settings["dpo"], workspace.folder / "cache_of_two"
    overrides = (*expected.overrides, f"data.cache_dir={cache}")
    before = start(workspace, "fsdp", *overrides)
    references = list((cache / "references").iterdir())
    assert len(references) == 2
    for folder in references:
        shutil.rmtree(folder)
    run = workspace.resume(before, SAVED, "ddp", 2, *overrides)
    assert run.returncode == 0, run.output
    assert run.facts["resumed_from"] and run.column("step") == list(range(1, STEPS + 1))
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert "reference log-probabilities of 100 training pairs" in run.output
    assert sorted((cache / "references").iterdir()) == sorted(references)


@pytest.mark.parametrize("overrides", [(), *long(("dpo={loss: kto}",), ("adapter={name: lora, rank: 4, alpha: 8}",))])
def test_the_exported_model_is_measured_against_the_model_that_the_run_began_with(
    overrides, workspace, settings, capsys
):
    """In a cache of its own, so the reference is found anew."""
    overrides = (overrides,) if isinstance(overrides, str) else overrides
    run = start(workspace, "single", *settings["dpo"].overrides, *overrides)
    cache = workspace.folder / "another_cache"
    shutil.rmtree(cache, ignore_errors=True)
    recorded = json.loads((run.directory / "run.json").read_text())
    recorded["recipe"]["data"]["cache_dir"] = str(cache)
    copy = workspace.folder / f"copy_{len(list(workspace.folder.iterdir()))}"
    shutil.copytree(run.directory, copy)
    (copy / "run.json").write_text(json.dumps(recorded))
    assert commands.main(["evaluate", str(copy), "--json", str(copy / "measured.json")]) == 0, capsys.readouterr()
    found = json.loads((copy / "measured.json").read_text())
    assert found["metrics"].keys() == {key for key in run.metrics[-1] if key.startswith("eval_")}
    for key, value in found["metrics"].items():
        assert value == pytest.approx(run.metrics[-1][key], rel=1e-4, abs=1e-6), key
    assert len(list((cache / "references").iterdir())) == 1  # of the held-out pairs alone


GPT2 = "{model_type: gpt2, n_embd: 32, n_layer: 4, n_head: 4, n_positions: 64, attn_pdrop: 0.3}"
DROPS = "model.path=null", f"model.config={GPT2}"
OTHERS = {"kto": "kto, beta: 0.2", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo, beta: 2.0, gamma: 0.5"}


@pytest.mark.parametrize(
    ("loss", "strategy", "world", "micro"),
    [
        ("kto", "ddp", 3, 2),
        *long(*((loss, name, 2, 2) for loss in OTHERS for name in ("fsdp", "fsdp_cp", "pipeline", "pipeline_1f1b"))),
        *long(("kto", "fsdp_ulysses", 4, 3), ("simpo", "fsdp_cp", 4, 2)),
        *long(("kto", "pipeline_zbv", 2, 2), ("kto", "pipeline_1f1b", 4, 3), ("simpo", "pipeline_dualpipev", 2, 2)),
        *long(("kto", "zero3", 3, 1), ("kto", "pipeline", 4, 3), ("simpo", "fsdp", 3, 2), ("kto", "fsdp_tp", 4, 2)),
    ],
)
def test_the_other_losses_depend_neither_on_ranks_nor_on_micro_batches(
    loss, strategy, world, micro, workspace, settings
):
    """kto compares each pair with the mean of the whole global batch, wherever its pairs are."""
    overrides = (*settings["dpo"].overrides, f"dpo={{loss: {OTHERS[loss]}}}")
    alone = start(workspace, "single", *overrides, "batch.micro_batch_size=8")
    spread = workspace.run(strategy, world, *overrides, f"batch.micro_batch_size={micro}")
    assert spread.returncode == 0, spread.output
    assert largest_relative_difference(spread.column("loss"), alone.column("loss")) < 1e-5
    assert largest_relative_difference(spread.column("grad_norm"), alone.column("grad_norm")) < 1e-4
    for key in ("eval_loss", "eval_margin", "eval_accuracy"):
        assert spread.metrics[-1][key] == pytest.approx(alone.metrics[-1][key], rel=1e-4), key
    assert alone.metrics[-1]["eval_loss"] != pytest.approx(alone.metrics[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("strategy", long("pipeline", "ddp", "pipeline_1f1b", "pipeline_interleaved"))
def test_ktos_first_pass_drops_what_the_step_drops(strategy, workspace, settings):
    """Also in a step that follows an evaluation, where nothing is dropped."""
    overrides = (*settings["dpo"].overrides, "dpo={loss: kto, beta: 0.2}", *DROPS, "evaluate.every_steps=2", "steps=6")
    alone = start(workspace, "single", *overrides, "batch.micro_batch_size=8")
    spread = start(workspace, strategy, *overrides, "batch.micro_batch_size=2")
    assert alone.facts["dropout"]["attn_pdrop"] == 0.3
    assert largest_relative_difference(spread.column("loss"), alone.column("loss")) < 1e-5
    assert largest_relative_difference(spread.column("grad_norm"), alone.column("grad_norm")) < 1e-4


@pytest.mark.parametrize("strategy", long("single", "zero3"))
def test_an_adapters_reference_is_the_base_model(strategy, workspace, settings):
    run = start(workspace, strategy, *settings["dpo"].overrides, "adapter={name: lora, rank: 4, alpha: 8}")
    assert run.column("loss")[0] == pytest.approx(math.log(2), rel=1e-6)
    assert min(run.column("loss")) < 0.69


def test_a_pipeline_refuses_a_reward_model_by_name(workspace, settings):
    run = workspace.run("pipeline", 2, *settings["reward"].overrides)
    assert run.returncode != 0
    assert "task: found reward, but a pipeline supports causal language models only; use another strategy" in run.output
