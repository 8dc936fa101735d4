"""Train each task in this one process, and beside it a loop of transformers and torch that reads the file by itself.

Arguments: a folder, a JSON object {task: [[number of rows, global batch size, number of steps], ...]}. Prints a JSON
line for each: the rows of every step, and loss and gradient norm of every step, of samecurve and of the other loop.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch
from task_columns import unread
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.interfaces.task import InitialState
from samecurve.models.skeleton import build_skeleton
from samecurve.strategy import preflight
from samecurve.tasks import registry

RATE, BETA, TEMPERATURE, LENGTH = 3e-3, 0.3, 0.2, 96
CUT = 8  # of packed rows
CLASSES = ("cold", "mild", "warm")
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = LLAMA | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
AUTO = {"reward": AutoModelForSequenceClassification, "classify": AutoModelForSequenceClassification}
AUTO |= {"mlm": AutoModelForMaskedLM, "embed": AutoModel}
PACKED = "pretrain"


def make_rows(count: int) -> list[dict]:
    """Rows that every task can read, of very different lengths."""
    draw = random.Random(count)

    def say(most: int) -> str:
        return " ".join("".join(draw.choices("abcdef", k=draw.randint(1, 4))) for _ in range(draw.randint(1, most)))

    return [
        {
            "text": f"{number} {say(20)}",
            "label": CLASSES[number % 3],
            "anchor": f"{number} {say(8)}",
            "positive": f"{say(20)} {number}",
            "prompt": f"{number} {say(6)}?",
            "completion": f" {say(20)}",
            "chosen": f" {say(12)} yes",
            "rejected": f" {say(20)} no",
        }
        for number in range(count)
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = None
    for task, shapes in json.loads(sys.argv[2]).items():
        for num_rows, batch_size, num_steps in shapes:
            rows = make_rows(num_rows)
            path = folder / f"{num_rows}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            recipe = settings(folder, path, task, batch_size, num_steps)
            models = save_models(folder, recipe, task)
            recipe["model"] = recipe["tokenizer"] = {"path": str(models["student"])}
            recipe |= {"distill": {"teacher": str(models["teacher"])}} if task == "distill" else {}
            plan = preflight.plan([write(folder, recipe)], os.environ)
            accelerator = accelerator or factory.build_accelerator(plan)  # one for all
            num_trained, steps, ours = train(plan, accelerator)
            everything = [list(range(num_rows))] * num_steps
            plain = Plain(task, models, rows).train(everything if batch_size == num_rows and task != PACKED else steps)
            found = {"task": task, "rows": num_trained, "steps": steps, "ours": ours, "plain": plain}
            print(json.dumps(found))


def settings(folder: Path, path: Path, task: str, batch_size: int, num_steps: int) -> dict:
    padded = {"packing": False, "group_by_length": True}
    found = {
        "task": task,
        "output_dir": str(folder / "run"),
        "seed": 5,
        "steps": num_steps,
        "precision": "fp32",
        "model": {"config": {"model_type": "llama", **LLAMA}},
        "tokenizer": {"vocabulary_size": 290},
        "data": {"path": str(path), "cache_dir": str(folder / "cache"), **({} if task == PACKED else padded)},
        "batch": {"global_batch_size": batch_size, "micro_batch_size": 2, "sequence_length": LENGTH},
        "optimizer": {"learning_rate": RATE, "max_grad_norm": 0.8},
    }
    found["data"]["ignore_columns"] = unread(task, make_rows(1)[0])
    if task in ("sft", "distill", "dpo", "reward"):
        found["data"]["chat"] = False
    if task == "continue_pretrain":
        found["schedule"] = {"warmup_steps": 1}
    if task == PACKED:
        found["batch"]["sequence_length"] = CUT
    found |= {"dpo": {"beta": BETA}} if task == "dpo" else {}
    found |= {"embed": {"temperature": TEMPERATURE}} if task == "embed" else {}
    if task in ("mlm", "classify", "embed"):
        found["model"]["config"] = {"model_type": "bert", **BERT}
    return found


def write(folder: Path, recipe: dict) -> str:
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return str(path)


def save_models(folder: Path, recipe: dict, task: str) -> dict[str, Path]:
    """As transformers writes and initialises them, with the tokenizer that was trained on the data."""
    if task in ("continue_pretrain", "distill"):  # these want a model's folder
        recipe = recipe | {"task": {"continue_pretrain": "pretrain", "distill": "sft"}[task]}
    plan = preflight.plan([write(folder, recipe)], os.environ)
    tokenizer = registry.load_task(plan.recipe).tokenizer
    sizes, found = dict(recipe["model"]["config"]), {}
    config = AutoConfig.for_model(sizes.pop("model_type"), vocab_size=len(tokenizer), initializer_range=0.2, **sizes)
    config.pad_token_id = tokenizer.pad_token_id
    if task == "reward":
        config.num_labels = 1
    if task == "classify":
        config.id2label = dict(enumerate(CLASSES))
    for seed, name in enumerate(("student", "teacher")):
        torch.manual_seed(seed)
        found[name] = folder / task / name
        AUTO.get(task, AutoModelForCausalLM).from_config(config).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def train(plan, accelerator) -> tuple[int, list[list[int]], list[list[float]]]:
    """How many rows there are, the rows of each step, and its loss and gradient norm."""
    recipe, task = plan.recipe, registry.load_task(plan.recipe)
    if recipe.task == "mlm":  # every token is hidden, so that nothing about it is random
        vars(task.train.masking).update(rate=1.0, masked=1.0, random=0.0)
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    engine = factory.build(accelerator, plan, skeleton, task)
    task.prepare(InitialState(engine, recipe, skeleton, ControlGroup(), lambda: None))
    batches = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, recipe.steps)
    results = [engine.step(micro_batches, RATE) for micro_batches in batches]
    steps = [batches.rows_of(step).tolist() for step in range(recipe.steps)]
    return len(task.train), steps, [[result.loss, result.grad_norm] for result in results]


class Plain:
    """What a reader of the documentation of transformers would write. One row at a time, so nothing is padded."""

    def __init__(self, task: str, models: dict[str, Path], rows: list[dict]):
        auto = AUTO.get(task, AutoModelForCausalLM)
        options = {"add_pooling_layer": False} if task == "embed" else {}
        self.model = auto.from_pretrained(models["student"], dtype=torch.float32, **options).train()
        before = models["teacher" if task == "distill" else "student"]
        self.other = auto.from_pretrained(before, dtype=torch.float32, **options).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(models["student"])
        self.loss = getattr(self, task)
        self.rows = self.packed(rows) if task == PACKED else rows

    def train(self, steps: list[list[int]]) -> list[list[float]]:
        parameters = list(self.model.parameters())
        matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
        found = []
        for step in steps:
            loss = self.loss([self.rows[index] for index in step])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.8)
            optimizer.step()
            optimizer.zero_grad()
            found.append([loss.item(), norm.item()])
        return found

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def answered(self, prompt: str, answer: str) -> tuple[torch.Tensor, int]:
        """The tokens, and how many of them are the prompt's."""
        ids = [*self.ids(prompt + answer), self.tokenizer.eos_token_id]
        assert len(ids) <= LENGTH, "a row would be cut"
        return torch.tensor([ids]), len(self.ids(prompt))

    def packed(self, rows: list[dict]) -> list[list[list[int]]]:
        """All documents end to end, cut every CUT tokens, and once more where one ends; with what is next."""
        documents = [[*self.ids(row["text"]), self.tokenizer.eos_token_id] for row in rows]
        found, place = [], 0
        for document in documents:
            for first in range(len(document)):
                if place % CUT == 0:
                    found.append([])
                if place % CUT == 0 or first == 0:
                    found[-1].append(document[first : first + 1])
                found[-1][-1][len(found[-1][-1]) :] = document[first + 1 : first + 2]
                place += 1
        return [[piece for piece in row if len(piece) > 1] for row in found]

    def pretrain(self, rows: list) -> torch.Tensor:
        return self.mean_of_tokens((torch.tensor([piece]), 1) for row in rows for piece in row)

    def continue_pretrain(self, rows: list[dict]) -> torch.Tensor:
        return self.mean_of_tokens((self.answered("", row["text"])[0], 1) for row in rows)

    def sft(self, rows: list[dict]) -> torch.Tensor:
        return self.mean_of_tokens(self.answered(row["prompt"], row["completion"]) for row in rows)

    def mean_of_tokens(self, sequences) -> torch.Tensor:
        """sequences: ids (1, n), and from which on they are trained."""
        parts = []
        for ids, first in sequences:
            logits = self.model(ids, use_cache=False).logits[0, first - 1 : -1]
            parts.append(functional.cross_entropy(logits, ids[0, first:], reduction="none"))
        return torch.cat(parts).mean()

    def distill(self, rows: list[dict]) -> torch.Tensor:
        parts = []
        for ids, first in (self.answered(row["prompt"], row["completion"]) for row in rows):
            with torch.no_grad():
                wanted = self.other(ids).logits[0, first - 1 : -1].log_softmax(dim=-1)
            said = self.model(ids).logits[0, first - 1 : -1].log_softmax(dim=-1)
            parts.append((wanted.exp() * (wanted - said)).sum(dim=-1))
        return torch.cat(parts).mean()

    def dpo(self, rows: list[dict]) -> torch.Tensor:
        margins = []
        for row in rows:
            chosen, rejected = (self.reward_of(row["prompt"], row[which]) for which in ("chosen", "rejected"))
            margins.append(chosen - rejected)
        return -functional.logsigmoid(torch.stack(margins)).mean()

    def reward_of(self, prompt: str, answer: str) -> torch.Tensor:
        ids, first = self.answered(prompt, answer)
        policy, reference = (
            found(ids).logits[0, first - 1 : -1].log_softmax(dim=-1).gather(-1, ids[0, first:, None]).sum()
            for found in (self.model, self.other)
        )
        return BETA * (policy - reference.detach())

    def reward(self, rows: list[dict]) -> torch.Tensor:
        scores = [
            [self.model(self.answered(row["prompt"], row[which])[0]).logits[0, 0] for which in ("chosen", "rejected")]
            for row in rows
        ]
        return -functional.logsigmoid(torch.stack([chosen - rejected for chosen, rejected in scores])).mean()

    def classify(self, rows: list[dict]) -> torch.Tensor:
        inputs = [self.tokenizer(row["text"], return_tensors="pt") for row in rows]
        logits = torch.cat([self.model(one["input_ids"]).logits for one in inputs])
        return functional.cross_entropy(logits, torch.tensor([CLASSES.index(row["label"]) for row in rows]))

    def embed(self, rows: list[dict]) -> torch.Tensor:
        anchors, positives = (
            torch.stack([self.embedding(row[column]) for row in rows]) for column in ("anchor", "positive")
        )
        similarities = functional.cosine_similarity(anchors[:, None], positives[None], dim=-1)
        return functional.cross_entropy(similarities / TEMPERATURE, torch.arange(len(rows)))

    def embedding(self, text: str) -> torch.Tensor:
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return self.model(input_ids=ids).last_hidden_state[0].mean(dim=0)

    def mlm(self, rows: list[dict]) -> torch.Tensor:
        parts = []
        for row in rows:
            ids = torch.tensor(self.tokenizer(row["text"])["input_ids"])
            hidden = torch.tensor(self.tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True))
            masked = torch.where(hidden == 0, self.tokenizer.mask_token_id, ids)
            logits = self.model(masked[None]).logits[0]
            parts.append(functional.cross_entropy(logits[hidden == 0], ids[hidden == 0], reduction="none"))
        return torch.cat(parts).mean()


if __name__ == "__main__":
    main()
