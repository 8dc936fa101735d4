"""classify and mlm under every kind of strategy, against a loop written with transformers and torch alone.

The loss is the one that transformers' own models give. For classify the loop also reads the file and calls the
tokenizer itself; for mlm it takes the hidden tokens from samecurve, because they are drawn at random.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import LLAMA, largest_relative_difference, long, relative_l2
from test_pipeline_schedules import ENGINES as SCHEDULES
from test_plain_loop import train
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
)

from samecurve.config import loader
from samecurve.data.batches import StepBatches
from samecurve.tasks import registry

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, SAVED, SEQUENCE_LENGTH = 10, 5, 48
CLASSES = ("cold", "mild", "warm")
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,  # the plain loop of transformers draws other masks; test_dropout_curves.py has them
    "attention_probs_dropout_prob": 0.0,
}
# The config's fields by what the labels of classify are; the losses are BertForSequenceClassification's own.
PROBLEMS = {
    "classify": {"id2label": dict(enumerate(CLASSES))},
    "multi_label": {"id2label": dict(enumerate(CLASSES)), "problem_type": "multi_label_classification"},
    "regression": {"num_labels": 1, "problem_type": "regression"},
    "relevance": {"num_labels": 1, "problem_type": "multi_label_classification"},
}
TAGGED = ("token_classify", "process_reward")
AUTO = {**dict.fromkeys(PROBLEMS, AutoModelForSequenceClassification), "mlm": AutoModelForMaskedLM}
AUTO |= dict.fromkeys(TAGGED, AutoModelForTokenClassification)
CUT_ROWS = ("fsdp_cp", "fsdp_ulysses", "fsdp_tp_cp")
ENGINES = {"single": "{}", "ddp": "DistributedDataParallel", "fsdp": "FSDP{}", "tp": "{}"}
ENGINES |= {**SCHEDULES, **dict.fromkeys(CUT_ROWS, "FSDP{}")}
WORLDS = {"single": 1, "fsdp_tp_cp": 4}
MODELS = {
    ("classify", "bert"): "BertForSequenceClassification",
    ("classify", "llama"): "LlamaForSequenceClassification",
    ("mlm", "bert"): "BertForMaskedLM",
    ("token_classify", "bert"): "BertForTokenClassification",
    ("process_reward", "llama"): "LlamaForTokenClassification",
    **{(problem, "bert"): "BertForSequenceClassification" for problem in tuple(PROBLEMS)[1:]},
}


@dataclass(frozen=True)
class Setting:
    """One task on one model: what a run is started with, and what the plain loop found."""

    overrides: tuple[str, ...]
    losses: list[float]
    norms: list[float]
    counts: list[int]
    weights: dict


@pytest.fixture(scope="module")
def files(workspace) -> dict[str, Path]:
    """Texts of very different lengths, some too long for a row; 37 to evaluate on, which no batch divides."""
    draw = random.Random(2)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    found = {}
    for name, count in (("train", 200), ("held_out", 37)):
        found[name] = workspace.folder / f"labelled_{name}.jsonl"
        with open(found[name], "w") as file:
            for _ in range(count):
                label = draw.choices(range(3), weights=(5, 3, 1))[0]
                known = words[20 * label : 20 * label + 30]
                row = {"text": " ".join(draw.choices(known, k=draw.randint(1, 30))), "label": CLASSES[label]}
                file.write(json.dumps(row) + "\n")
        rows = [json.loads(line) for line in found[name].read_text().splitlines()]
        labels = {"multi_label": lambda: draw.sample(CLASSES, draw.randint(0, 3)), "relevance": draw.random}
        labels["regression"] = lambda: draw.gauss(1, 2)
        for problem, label in labels.items():
            found[f"{name} {problem}"] = workspace.folder / f"{problem}_{name}.jsonl"
            more = {"other": rows[7]["text"]} if problem == "relevance" else {}
            lines = [json.dumps({**row, **more, "label": label()}) + "\n" for row in rows]
            found[f"{name} {problem}"].write_text("".join(lines))
        for task in TAGGED:
            found[f"{name} {task}"] = workspace.folder / f"{task}_{name}.jsonl"
            lines = [json.dumps(tagged(task, row["text"].split())) + "\n" for row in rows]
            found[f"{name} {task}"].write_text("".join(lines))
    return found


def tagged(task: str, words: list[str]) -> dict:
    if task == "token_classify":
        return {"tokens": words, "label": [CLASSES[len(word) % 3] for word in words]}
    steps = [" ".join(words[n : n + 3]) for n in range(0, len(words), 3)]
    return {"prompt": words[0], "completions": steps, "labels": ["a" in step for step in steps]}


def of_problem(files, task: str, name: str) -> Path:
    return files.get(f"{name} {task}", files[name])


@pytest.fixture(scope="module")
def settings(workspace, files) -> dict[tuple[str, str], Setting]:
    return {key: setting(workspace, files, *key) for key in MODELS}


def setting(workspace, files, task: str, family: str) -> Setting:
    """The model and its tokenizer are on the disk as transformers writes them."""
    common = [f"task={'classify' if task in PROBLEMS else task}", f"steps={STEPS}", f"checkpoint.every_steps={SAVED}"]
    common += [f"data.path={of_problem(files, task, 'train')}"]
    common += [f"classify.problem_type={task}"] if task in tuple(PROBLEMS)[1:] else []
    common += ["data.text_pair_column=other"] if task == "relevance" else []
    if task == "process_reward":
        common += ["data.text_column=prompt", "data.words_column=completions", "data.label_column=labels"]
    common += [f"data.cache_dir={workspace.folder / 'cache'}", "data.packing=false", "data.validation_fraction=0"]
    common += [f"evaluate={{path: {of_problem(files, task, 'held_out')}, every_steps: {STEPS}}}"]
    common += [f"batch.sequence_length={SEQUENCE_LENGTH}", "batch.micro_batch_size=2"]
    tokenizer = registry.load_task(loader.read_recipe(str(workspace.recipe), common).recipe).tokenizer
    fields = dict(BERT if family == "bert" else LLAMA)
    config = AutoConfig.for_model(
        fields.pop("model_type"), vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **fields
    )
    fields_of_task = {"id2label": dict(enumerate(CLASSES[: 3 if task == "token_classify" else 2]))}
    fields_of_task |= {"classifier_dropout": 0.0}  # which is 0.1 in a decoder without the key
    for key, value in (fields_of_task if task in TAGGED else PROBLEMS.get(task, {})).items():
        setattr(config, key, value)
    torch.manual_seed(1)
    folder = workspace.folder / f"{family}_{task}"
    AUTO[task].from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    overrides = (*common, f"model={{path: {folder}}}", f"tokenizer={{path: {folder}}}")
    return Setting(overrides, *plain_loop(workspace, files, task, overrides))


def plain_loop(workspace, files, task, overrides):
    found = loader.read_recipe(str(workspace.recipe), overrides).recipe
    model = AUTO[task].from_pretrained(found.model.path, dtype=torch.float32).train()
    read = {**dict.fromkeys(PROBLEMS, labelled), **dict.fromkeys(TAGGED, labelled)}.get(task, hidden)
    counts = []

    def steps():
        for inputs, labels in read(found, of_problem(files, task, "train")):
            counts.append(len(labels) if task in PROBLEMS else int((labels != -100).sum()))
            yield model(**inputs, labels=labels).loss

    losses, norms = train(model, steps(), STEPS)
    return losses, norms, counts, {name: p.detach() for name, p in model.named_parameters()}


def labelled(found, path):
    """Each step's texts. Which ones those are is all that is asked of samecurve."""
    steps = StepBatches(registry.load_task(found).train, found.seed, found.batch, (0, 1), STEPS)
    texts = [json.loads(line) for line in path.read_text().splitlines()]
    for step in range(STEPS):
        yield encoded(found.model.path, [texts[index] for index in steps.rows_of(step)])


def encoded(folder, rows):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "tokens" in rows[0]:
        return collated(tokenizer, [words_and_tags(tokenizer, row) for row in rows])
    if "completions" in rows[0]:
        return collated(tokenizer, [steps_and_tags(tokenizer, row) for row in rows])
    texts = [row["text"] for row in rows]
    pairs = [row["other"] for row in rows] if "other" in rows[0] else None
    inputs = tokenizer(texts, pairs, padding=True, truncation=True, max_length=SEQUENCE_LENGTH, return_tensors="pt")
    inputs.pop("token_type_ids", None)  # of one text, all 0
    return inputs, torch.tensor([target(row["label"]) for row in rows])


def collated(tokenizer, rows):
    collate = DataCollatorForTokenClassification(tokenizer)
    batch = collate([{"input_ids": ids[:SEQUENCE_LENGTH], "labels": tags[:SEQUENCE_LENGTH]} for ids, tags in rows])
    return batch, batch.pop("labels")


def words_and_tags(tokenizer, row):
    """The words of a byte-level tokenizer, each with the space before it, and a class for its first token."""
    ids, tags = [], []
    for place, (word, label) in enumerate(zip(row["tokens"], row["label"], strict=True)):
        own = tokenizer(f"{' ' * (place > 0)}{word}", add_special_tokens=False)["input_ids"]
        ids += own
        tags += [CLASSES.index(label), *[-100] * (len(own) - 1)]
    whole = tokenizer(" ".join(row["tokens"]))["input_ids"]
    before = whole.index(ids[0])
    assert whole[before : before + len(ids)] == ids
    return whole, [*[-100] * before, *tags, *[-100] * (len(whole) - before - len(ids))]


def steps_and_tags(tokenizer, row):
    """As PRMTrainer.tokenize_row of TRL does: the label is that of the separator's last token."""
    ids = [tokenizer.bos_token_id, *tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]]
    tags = [-100] * len(ids)
    for step, label in zip(row["completions"], row["labels"], strict=True):
        own = tokenizer(step, add_special_tokens=False)["input_ids"] + tokenizer.encode("\n", add_special_tokens=False)
        ids, tags = ids + own, [*tags, *[-100] * (len(own) - 1), int(label)]
    return ids, tags


def target(label) -> int | list[float]:
    if isinstance(label, str):
        return CLASSES.index(label)
    return [float(name in label) for name in CLASSES] if isinstance(label, list) else [label]


def hidden(found, path):
    for batches in StepBatches(
        registry.load_task(found).train,
        found.seed,
        found.batch.model_copy(update={"micro_batch_size": 8}),
        (0, 1),
        STEPS,
    ):
        yield batches[0].inputs, batches[0].labels


ALL = {(task, name) for task in MODELS for name in ("single", "ddp", "fsdp", "zero2", "zero3")}
ALL |= {(("classify", "llama"), name) for name in ("tp", *CUT_ROWS, *SCHEDULES)}
EVERY_DAY = {
    ("classify", "bert"): ("zero3",),
    ("mlm", "bert"): ("fsdp",),
    ("classify", "llama"): ("zero3",),
    ("multi_label", "bert"): ("zero2",),
    ("token_classify", "bert"): ("zero3",),
}
CASES = [(*task, name) for task, names in EVERY_DAY.items() for name in names]
CASES += long(*((*task, name) for task, name in sorted(ALL) if name not in EVERY_DAY.get(task, ())))


@pytest.mark.parametrize(("task", "family", "strategy"), CASES)
def test_follows_the_plain_loop(task, family, strategy, workspace, settings):
    expected = settings[task, family]
    run = start(workspace, expected, strategy, WORLDS.get(strategy, 2))
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == WORLDS.get(strategy, 2)
    assert run.facts["engine"] == ENGINES.get(strategy, "DeepSpeedEngine").format(MODELS[task, family])
    assert run.column("tokens") == expected.counts
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.norms) < 1e-4
    assert relative_l2(run.weights, expected.weights) < 1e-4


def start(workspace, expected: Setting, strategy: str, world: int = 2):
    alone = strategy == "single"
    run = workspace.run(None if alone else strategy, 1 if alone else world, *expected.overrides)
    assert run.returncode == 0, run.output
    return run


@pytest.mark.parametrize(("family", "strategy"), [("llama", "zero3"), *long(("bert", "ddp"))])
def test_the_exported_classifier_has_the_metrics_of_the_run(family, strategy, workspace, files, settings):
    """Counted here one text at a time, over 37 texts that two ranks shared."""
    run = start(workspace, settings["classify", family], strategy)
    folder = run.directory / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert type(model).__name__ == MODELS["classify", family]
    assert model.config.id2label == dict(enumerate(CLASSES))
    answers, labels, loss = [], [], 0.0
    for line in files["held_out"].read_text().splitlines():
        inputs, label = encoded(folder, [json.loads(line)])
        with torch.no_grad():
            output = model(**inputs, labels=label)
        answers.append(output.logits.argmax().item())
        labels.append(label.item())
        loss += output.loss.item() / 37
    right = [a for a, b in zip(answers, labels, strict=True) if a == b]
    scores = [2 * right.count(c) / (answers.count(c) + labels.count(c)) for c in {*answers, *labels}]
    measured = run.metrics[-1]
    assert measured["eval_rows"] == len(labels) == 37
    assert measured["eval_accuracy"] == pytest.approx(len(right) / 37)
    assert measured["eval_f1"] == pytest.approx(sum(scores) / len(scores))
    assert measured["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_goes_on_under_another_strategy_with_the_same_hidden_tokens(workspace, settings):
    expected = settings["mlm", "bert"]
    before = start(workspace, expected, "ddp")
    run = workspace.resume(before, SAVED, "zero3", 2, *expected.overrides)
    assert run.returncode == 0, run.output
    assert run.facts["resumed_from"] and run.column("step") == list(range(1, STEPS + 1))
    assert run.column("tokens") == expected.counts
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert run.metrics[-1]["eval_accuracy"] == pytest.approx(before.metrics[-1]["eval_accuracy"])


def test_a_pipeline_refuses_them_by_name(workspace, settings):
    run = workspace.run("pipeline", 2, *settings["mlm", "bert"].overrides)
    assert run.returncode != 0
    assert "task: found mlm, but a pipeline supports causal language models only; use another strategy" in run.output
