"""sft under every kind of strategy, against a loop written with transformers and torch alone.

The loop reads each conversation by itself, padded, with the marks that transformers finds in the template: whatever
packing, marks or strategy get wrong makes another curve.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch
from harness import LLAMA, largest_relative_difference, long, relative_l2
from test_plain_loop import train
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config import loader
from samecurve.data.batches import StepBatches
from samecurve.data.datasets.base import LengthGroups
from samecurve.tasks import registry

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, SEQUENCE_LENGTH = 8, 160


@pytest.fixture(scope="module")
def chats(workspace) -> Path:
    """200 conversations of one to three exchanges, of very different lengths; some are too long for a row."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    path = workspace.folder / "chats.jsonl"
    with open(path, "w") as file:
        for _ in range(200):
            roles = ("user", "assistant") * draw.randint(1, 3)
            said = [{"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 12)))} for role in roles]
            file.write(json.dumps({"messages": said}) + "\n")
    weighted = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    for message in (message for said in weighted for message in said if message["role"] == "assistant"):
        message["weight"] = draw.choice([0.1, 0.7, 1, 3])
    lines = [json.dumps({"messages": said}) + "\n" for said in weighted]
    path.with_name("weighted.jsonl").write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def overrides(workspace, chats) -> tuple[str, ...]:
    """A model and a tokenizer that transformers wrote, on the conversations."""
    common = ["task=sft", f"steps={STEPS}", f"data.path={chats}", f"data.cache_dir={workspace.folder / 'cache'}"]
    common += ["data.validation_fraction=0", "evaluate.every_steps=0", "checkpoint.every_steps=0"]
    common += [f"batch.sequence_length={SEQUENCE_LENGTH}", "batch.micro_batch_size=2"]
    tokenizer = registry.load_task(loader.read_recipe(str(workspace.recipe), common).recipe).tokenizer
    folder = workspace.folder / "chat_model"
    torch.manual_seed(1)
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return (*common, f"model={{path: {folder}}}", f"tokenizer={{path: {folder}}}")


MODES = {"packed": ("data.packing=true",), "grouped": ("data.packing=false", "data.group_by_length=true")}
MODES |= {f"weighted, {mode}": (*MODES[mode], "data.token_weights=true") for mode in tuple(MODES)}
MODES["weighted, whole logits"] = (*MODES["weighted, packed"], "loss.implementation=full")


def overrides_of(mode: str, overrides, chats) -> tuple[str, ...]:
    weighted = (f"data.path={chats.with_name('weighted.jsonl')}",) if "weighted" in mode else ()
    return (*overrides, *MODES[mode], *weighted)


@pytest.fixture(scope="module")
def plain(workspace, chats, overrides):
    """By mode: (losses, gradient norms, trained tokens, weights)."""
    return {mode: plain_loop(workspace, chats, overrides_of(mode, overrides, chats)) for mode in MODES}


def plain_loop(workspace, chats, overrides):
    found = loader.read_recipe(str(workspace.recipe), overrides).recipe
    model = AutoModelForCausalLM.from_pretrained(found.model.path, dtype=torch.float32).train()
    steps = list(batches(found, chats))
    tokens = [int((labels[:, 1:] != -100).sum()) for *_, (labels, _) in steps]
    losses, norms = train(model, (weighted_loss(model, *step) for step in steps), STEPS)
    return losses, norms, tokens, {name: p.detach() for name, p in model.named_parameters()}


def weighted_loss(model, ids, mask, labels_and_weights):
    labels, weights = (values[:, 1:] for values in labels_and_weights)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    weights = weights.flatten() * (labels != -100).flatten()
    return (losses * weights).sum() / weights.sum()


def batches(found, chats):
    """Each step's conversations, one a row. Which ones those are is all that is asked of samecurve."""
    task = registry.load_task(found)
    conversations = [json.loads(line)["messages"] for line in Path(found.data.path).read_text().splitlines()]
    assert task.train.num_dropped == 0 and 0 < task.train.num_truncated < 100
    steps = StepBatches(task.train, found.seed, found.batch, (0, 1), STEPS)
    for step in range(STEPS):
        ids, labels, weights = [], [], []
        for index in documents(task.train, steps.rows_of(step)):
            encoded = task.tokenizer.apply_chat_template(
                conversations[index], return_dict=True, return_assistant_tokens_mask=True
            )
            tokens = torch.tensor(encoded["input_ids"])[: SEQUENCE_LENGTH + 1]
            marks = torch.tensor(encoded["assistant_masks"])[: SEQUENCE_LENGTH + 1]
            ids.append(tokens)
            labels.append(tokens.masked_fill(marks == 0, -100))
            given = [turn.get("weight", 1.0) for turn in conversations[index] if turn["role"] == "assistant"]
            nth = (marks.diff(prepend=torch.zeros(1, dtype=torch.long)) > 0).cumsum(0)  # the answer, from 1
            weights.append(torch.tensor([0.0, *given])[nth])
        padded = pad_sequence(labels, batch_first=True, padding_value=-100), pad_sequence(weights, batch_first=True)
        mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        yield pad_sequence(ids, batch_first=True), mask, padded


def documents(rows, indices) -> list[int]:
    if isinstance(rows, LengthGroups):
        return indices.tolist()
    members = [rows.members[slice(*rows.row_offsets[index : index + 2])].tolist() for index in indices]
    assert len(members) == 8 < sum(map(len, members))
    return sum(members, [])


CASES = [("packed", "fsdp"), ("packed", "pipeline"), ("grouped", "fsdp"), ("weighted, packed", "zero2")]
CASES += long(
    *(
        ("weighted, packed", name)
        for name in (None, "ddp", "fsdp", "zero3", "tp", "pipeline", "pipeline_1f1b", "fsdp_cp")
    ),
    *(("weighted, grouped", name) for name in ("fsdp", "pipeline_1f1b")),
    *(("weighted, whole logits", name) for name in (None, "zero2")),
    ("packed", None),
    ("packed", "zero3"),
    ("packed", "ddp"),
    ("packed", "zero2"),
    ("packed", "tp"),
    ("packed", "tp, sequence-parallel"),
    ("packed", "fsdp_cp, in a ring"),
    ("packed", "pipeline_1f1b"),
    ("packed", "fsdp_ulysses"),
    ("grouped", "pipeline_1f1b"),
    ("grouped", "pipeline_zbv"),
    ("grouped", None),
    ("grouped", "zero3"),
    ("grouped", "fsdp_cp"),
)


@pytest.mark.parametrize(("mode", "strategy"), CASES)
def test_follows_the_plain_loop(mode, strategy, workspace, chats, overrides, plain):
    losses, norms, tokens, weights = plain[mode]
    name, _, switch = (strategy or "single").partition(", ")
    path = {"": strategy, "in a ring": workspace.ring, "sequence-parallel": workspace.sequence_parallel("tp")}[switch]
    run = workspace.run(path, 1 if strategy is None else 2, *overrides_of(mode, overrides, chats))
    assert run.returncode == 0, run.output
    assert (run.facts["strategy"], run.facts["recipe"]["task"]) == (name, "sft")
    assert run.facts["tp_sequence_parallel"] == (switch == "sequence-parallel")
    assert (run.facts["context_parallel"] == "ring") == (switch == "in a ring")
    assert run.column("tokens") == tokens
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    assert relative_l2(run.weights, weights) < 1e-4


def test_a_pipeline_refuses_rows_of_changing_shape(workspace, overrides):
    run = workspace.run("pipeline", 2, *overrides, *MODES["grouped"])
    assert "data.group_by_length: found true, but pipeline stages exchange tensors of one fixed shape" in run.output


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"messages": [{"role": "bot", "content": "x"}]}', "messages[0].role is 'bot'; write 'assistant'"),
        (
            '{"messages": [{"role"',
            "invalid JSON at column 22: Expecting ':' delimiter; correct or remove the line "
            "(is the file truncated here?)",
        ),
    ],
)
def test_data_errors_end_all_ranks_at_once(workspace, chats, overrides, tmp_path, broken, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(chats.read_text() + broken)
    run = workspace.run("ddp", 2, *overrides, f"data.path={path}")
    told = (run.directory / "status.json").stat().st_mtime
    assert time.time() - told < 9  # a rank that is left waiting lives 10 s longer than the one that tells
    assert run.returncode != 0
    assert run.status["exit_code"] == 3
    assert run.status["reason"] == f"{path}:201: {message}, or set data.bad_rows=drop to train without it"
    assert run.output.count(message) == 1


def test_dropped_rows_leave_the_curve_as_it_is(workspace, chats, overrides, plain, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text(chats.read_text() + '{"messages": []}\n{"messages"\n')
    run = workspace.run("ddp", 2, *overrides, *MODES["packed"], f"data.path={path}", "data.bad_rows=drop")
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), plain["packed"][0]) < 1e-5
    bad_rows = [json.loads(line) for line in (run.directory / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["line"] for row in bad_rows] == [201, 202] and run.facts["data"]["bad_rows"] == 2
