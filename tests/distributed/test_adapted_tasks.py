"""Adapters of classifiers, reward models, embeddings and masked language models under every kind of strategy.

The base is another model than the one that is trained: it comes without the head. A single process is compared with
a loop of peft, transformers and torch alone, the other strategies with the single process.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from harness import LLAMA, LORA, Run, largest_relative_difference, long, relative_l2
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from task_columns import unread
from test_encoder_tasks import BERT, CLASSES, STEPS, encoded, labelled
from test_plain_loop import train
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from samecurve.cli import commands
from samecurve.config import loader
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weights import load_weights
from samecurve.tasks import registry

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
SAVED, SEQUENCE_LENGTH = 5, 48
FAMILIES = {"classify": "bert", "reward": "llama", "embed": "bert", "mlm": "bert"}
PRETRAINED = {"bert": AutoModelForMaskedLM, "llama": AutoModelForCausalLM}
SHARDED = ("fsdp", "zero3")
STRATEGIES = ("ddp", "zero2", *SHARDED)
EVERY_DAY = [("classify", "zero3")]
CASES = EVERY_DAY + long(*((t, s) for t in FAMILIES for s in STRATEGIES if (t, s) not in EVERY_DAY))
CASES += long(("reward", "fsdp_cp"), ("reward", "fsdp_ulysses"), ("reward", "pipeline_1f1b"))
# trained beside the matrices: by peft's name in the file
HEADS = {
    "classify": {f"{name}.{kind}" for name in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")},
    "reward": {"score.weight"},
}


@pytest.fixture(scope="module")
def rows(workspace) -> dict[str, Path]:
    """What any of the tasks can read, with texts of very different lengths; 21 rows to evaluate on."""
    draw = random.Random(6)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]

    def text(known: list[str]) -> str:
        return " ".join(draw.choices(known, k=draw.randint(1, 14)))

    found = {}
    for part, count in (("train", 120), ("held_out", 21)):
        found[part] = workspace.folder / f"adapted_{part}.jsonl"
        made = []
        for number in range(count):
            label = draw.choices(range(3), weights=(5, 3, 1))[0]
            known, other = words[20 * label : 20 * label + 20], draw.sample(words, 8)
            row = {"text": f"{text(known)} {number}", "label": CLASSES[label], "prompt": text(other)}
            row |= {"anchor": f"{text(other)} {number}", "positive": text(other), "negative": text(words)}
            made.append({**row, "chosen": f" {text(known)}", "rejected": f" {text(other)} x"})
        found[part].write_text("".join(json.dumps(row) + "\n" for row in made))
    return found


@pytest.fixture(scope="module")
def settings(workspace, rows) -> dict[str, tuple[str, ...]]:
    """Overrides for each task. Its base model lies on the disk as transformers writes it."""
    return {task: overrides(workspace, rows, task) for task in FAMILIES}


def overrides(workspace, rows, task: str) -> tuple[str, ...]:
    common = [f"task={task}", f"steps={STEPS}", f"checkpoint.every_steps={SAVED}", f"data.path={rows['train']}"]
    common += [f"data.cache_dir={workspace.folder / 'cache'}", "data.packing=false", "data.validation_fraction=0"]
    common += [f"evaluate={{path: {rows['held_out']}, every_steps: {STEPS}}}", "schedule.warmup_steps=2"]
    common += [f"batch.sequence_length={SEQUENCE_LENGTH}", "batch.micro_batch_size=2"]
    common += ["data.chat=false"] if task == "reward" else []
    columns = ("text", "label", "prompt", "anchor", "positive", "negative", "chosen", "rejected")
    common += [f"data.ignore_columns=[{','.join(unread(task, columns))}]"]
    tokenizer = registry.load_task(loader.read_recipe(str(workspace.recipe), common).recipe).tokenizer
    family = FAMILIES[task]
    fields = dict(BERT if family == "bert" else LLAMA)
    config = AutoConfig.for_model(
        fields.pop("model_type"), vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **fields
    )
    torch.manual_seed(1)
    folder = workspace.folder / f"adapted_{task}"
    PRETRAINED[family].from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return (*common, f"model={{path: {folder}}}", f"tokenizer={{path: {folder}}}", LORA)


def start(workspace, settings, task: str, strategy: str, *more: str) -> Run:
    alone = strategy == "single"
    run = workspace.run(None if alone else strategy, 1 if alone else 2, *settings[task], *more)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == (1 if alone else 2)
    assert run.facts["num_parameters"] > 2 * run.facts["num_trained_parameters"]
    return run


def exported(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize(("task", "strategy"), CASES)
def test_the_same_curve_as_by_a_single_process(task, strategy, workspace, settings):
    expected, run = (start(workspace, settings, task, each) for each in ("single", strategy))
    assert run.column("tokens") == expected.column("tokens")
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    found, weights = exported(run), exported(expected)
    assert {name.removeprefix("base_model.model.") for name in found if ".lora_" not in name} == HEADS.get(task, set())
    assert relative_l2(found, weights) < 1e-4
    for key, value in expected.metrics[-1].items():
        if key.startswith("eval_"):
            assert run.metrics[-1][key] == pytest.approx(value, rel=1e-4), key
    assert_the_checkpoint_holds_what_is_trained(run)


def assert_the_checkpoint_holds_what_is_trained(run: Run) -> None:
    names, numels = set(), 0
    for path in run.checkpoint(STEPS).glob("rank_*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if not key.startswith("rng/")]
            names |= set(keys)
            numels += sum(file.get_slice(key).get_shape()[0] for key in keys)
    assert len(names) == 3 * len(exported(run))  # weight and two moments
    assert numels == 3 * run.facts["num_trained_parameters"]


def test_a_single_process_follows_a_loop_of_peft(workspace, rows, settings):
    """peft wraps what is in modules_to_save, and stores it; here it is trained in place."""
    made = loader.read_recipe(str(workspace.recipe), settings["classify"]).recipe
    model = AutoModelForSequenceClassification.from_pretrained(made.model.path, num_labels=3)
    whole = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["pooler"], task_type=TaskType.SEQ_CLS
    )
    model = get_peft_model(model, whole).train()
    trained = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    task = registry.load_task(made)
    shape = build_skeleton(made, task.vocabulary_size, task.special_tokens, task.head)
    with torch.no_grad():  # the same draw
        load_weights(shape, made, lambda name, tensor: trained[name].copy_(tensor), trained.keys())
    steps = (model(**inputs, labels=labels).loss for inputs, labels in labelled(made, rows["train"]))
    losses, norms = train(model, steps, STEPS, warmup=2)
    run = start(workspace, settings, "classify", "single")
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    weights = {key: value.detach() for key, value in get_peft_model_state_dict(model).items()}
    assert relative_l2(exported(run), weights) < 1e-4


@pytest.mark.parametrize(("origin", "strategy"), [("zero3", "fsdp"), *long(("fsdp", "zero2"), ("zero2", "zero3"))])
def test_a_run_goes_on_under_another_strategy(origin, strategy, workspace, settings):
    golden = start(workspace, settings, "classify", origin)
    run = workspace.resume(golden, SAVED, strategy, 2, *settings["classify"])
    assert run.returncode == 0, run.output
    assert run.facts["resumed_from"] and run.column("step") == list(range(1, STEPS + 1))
    assert largest_relative_difference(run.column("loss"), golden.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), golden.column("grad_norm")) < 1e-4


AFTER = [("classify", "zero3"), *long(("reward", "fsdp"), ("embed", "ddp"), ("mlm", "ddp"))]


@pytest.mark.parametrize(("task", "strategy"), AFTER)
def test_what_is_done_with_it_afterwards(task, strategy, workspace, settings, tmp_path, monkeypatch):
    """Measured again, merged and measured, exported from a checkpoint: the numbers of the run."""
    monkeypatch.setenv("SAMECURVE_CACHE", str(workspace.folder / "cache"))
    run, merged, again = start(workspace, settings, task, strategy), tmp_path / "merged", tmp_path / "again"
    assert commands.main(["merge", str(run.directory), "--output", str(merged)]) == 0
    for more in ([], ["--model", str(merged)]):
        command = ["evaluate", str(run.directory), "--json", str(tmp_path / "found.json"), *more]
        assert commands.main(command) == 0
        found = json.loads((tmp_path / "found.json").read_text())["metrics"]
        assert found == {name: pytest.approx(run.metrics[-1][name], rel=1e-5) for name in found} != {}
    assert commands.main(["export", str(run.directory), "--checkpoint", "latest", "--output", str(again)]) == 0
    weights = load_file(again / "adapter_model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in exported(run).items())
    assert {path.name for path in again.iterdir()} == {path.name for path in (run.directory / "model").iterdir()}


@pytest.mark.parametrize(("task", "strategy"), AFTER)
def test_predict_says_what_the_run_measured(task, strategy, workspace, rows, settings, tmp_path, capsys):
    """On the held-out rows, one text at a time or several."""
    run = start(workspace, settings, task, strategy)
    held_out = [json.loads(line) for line in rows["held_out"].read_text().splitlines()]

    def predicted(made: list[dict]) -> list[dict]:
        file = tmp_path / "asked.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
        capsys.readouterr()
        assert commands.main(["predict", str(run.directory), "--file", str(file), "--batch_size", "4"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(found) == len(made)
        return found

    measured = run.metrics[-1]
    if task == "classify":
        both = list(zip(predicted(held_out), held_out, strict=True))
        assert measured["eval_accuracy"] == pytest.approx(sum(a["label"] == row["label"] for a, row in both) / 21)
        loss = -sum(math.log(answer["probabilities"][row["label"]]) for answer, row in both) / 21
        assert measured["eval_loss"] == pytest.approx(loss, rel=1e-4)
    elif task == "reward":
        for name in ("chosen", "rejected"):
            found = predicted([{"prompt": row["prompt"], "completion": row[name]} for row in held_out])
            mean = sum(answer["score"] for answer in found) / 21
            assert measured[f"eval_rewards_{name}"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    elif task == "embed":
        vectors = {}
        for name in ("anchor", "positive", "negative"):
            found = predicted([{"anchor": row[name]} for row in held_out])
            vectors[name] = torch.tensor([answer["embedding"] for answer in found])
        similar = vectors["anchor"] @ torch.cat([vectors["positive"], vectors["negative"]]).T
        right = similar.argmax(dim=1) == torch.arange(21)
        assert measured["eval_accuracy_at_1"] == pytest.approx(right.double().mean().item())
    else:
        (found,) = predicted([{"text": "abc [MASK]"}])
        assert 0 < sum(each["probability"] for each in found["masks"][0]) <= 1


def test_peft_and_transformers_load_what_the_run_measured(workspace, rows, settings, monkeypatch):
    run = start(workspace, settings, "classify", "zero3")
    base, folder = run.facts["recipe"]["model"]["path"], run.directory / "model"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model = PeftModel.from_pretrained(model, folder).eval()
    held_out = [json.loads(line) for line in rows["held_out"].read_text().splitlines()]
    inputs, labels = encoded(folder, held_out)
    with torch.no_grad():
        output = model(**inputs, labels=labels)
    measured = run.metrics[-1]
    assert measured["eval_rows"] == 21 and measured["eval_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    right = output.logits.argmax(dim=-1) == labels
    assert measured["eval_accuracy"] == pytest.approx(right.double().mean().item())
    code = re.search(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    found = {"folder": folder}
    monkeypatch.chdir(Path(base).parent)  # the card names the base model's folder, not where this machine has it
    exec(code, found)  # the card's
    with torch.no_grad():
        torch.testing.assert_close(found["model"].eval()(**inputs).logits, output.logits)
    assert found["model"].config.id2label == dict(enumerate(CLASSES))
    assert found["tokenizer"].pad_token_id is not None


@pytest.mark.full
@pytest.mark.parametrize("task", ["classify", "reward", "embed", "mlm"])
def test_on_4_bit_weights(task, workspace, settings):
    pytest.importorskip("bitsandbytes")
    # on a CPU bitsandbytes 0.50 evaluates only layers whose inputs are multiples of 64, and the toy's are 32 wide
    more = (f"{LORA[:-1]}, quantization: 4bit}}", "evaluate.every_steps=0")
    single, ddp = (start_quantized(workspace, settings, task, each, more) for each in ("single", "ddp"))
    assert largest_relative_difference(ddp.column("loss"), single.column("loss")) < 1e-5
    assert largest_relative_difference(ddp.column("grad_norm"), single.column("grad_norm")) < 1e-4
    assert HEADS.get(task, set()) <= {name.removeprefix("base_model.model.") for name in exported(ddp)}


def start_quantized(workspace, settings, task, strategy, more):
    alone = strategy == "single"
    run = workspace.run(None if alone else strategy, 1 if alone else 2, *settings[task], *more)
    assert run.returncode == 0, run.output
    assert run.facts["adapter"]["quantization"] == "4bit"
    assert run.facts["num_parameters_per_rank"] < run.facts["num_parameters"]
    return run
