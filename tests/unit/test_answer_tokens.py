"""Which tokens of an answer are trained, by hand for the templates of three families, and the loss that they make.

Square brackets enclose what is trained.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import END_OF_TURN, FAMILIES, make_tokenizer, save_models
from report_cases import check_message
from tiny_recipes import jsonl, make_recipe
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from samecurve.data import chat_encoder
from samecurve.data.schemas import conversation, preference
from samecurve.errors import DataError
from samecurve.interfaces.task import Task
from samecurve.tasks import registry

PAIR = {"prompt": "a", "chosen": "b", "rejected": "cd"}
# (template, train_on): what becomes of the chosen answer
BY_HAND = {
    ("chatml", "assistant"): "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n",
    ("chatml", "completion"): "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>\n]",
    ("llama3", "assistant"): (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[b<|eot_id|>]"
    ),
    ("llama3", "completion"): (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[b<|eot_id|>]"
    ),
    ("gemma", "assistant"): "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n[b<end_of_turn>]\n",
    ("gemma", "completion"): "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n[b<end_of_turn>\n]",
}


def pair_tokens(name: str, row: dict, train_on: str) -> list[tuple[list[int], list[bool]]]:
    """Ids and marks of both answers."""
    schema = preference.PairSchema()
    encoder = preference.PairEncoder(make_tokenizer(name), schema, train_on)
    (found,) = encoder.encode([preference.pair("here", row, schema)])
    segments = np.array(found.segments)
    return [
        (np.array(found.tokens)[segments == which].tolist(), np.array(found.trained)[segments == which].tolist())
        for which in (0, 1)
    ]


def bracketed(tokenizer, tokens: list[int], trained: list[bool]) -> str:
    runs = itertools.groupby(zip(tokens, trained, strict=True), key=lambda both: both[1])
    parts = ((mark, tokenizer.decode([token for token, _ in run])) for mark, run in runs)
    return "".join(f"[{text}]" if mark else text for mark, text in parts)


@pytest.mark.parametrize(("name", "train_on"), BY_HAND)
def test_the_trained_tokens_of_an_answer_by_hand(name, train_on):
    tokenizer = make_tokenizer(name)
    chosen, rejected = (bracketed(tokenizer, *answer) for answer in pair_tokens(name, PAIR, train_on))
    assert chosen == BY_HAND[name, train_on]
    assert rejected == chosen.replace("[b", "[cd")
    row = {"prompt": "a", "completion": "b"}  # and sft's are the same
    schema = conversation.ChatSchema(train_on=train_on)
    (found,) = chat_encoder.encoder(tokenizer, schema).encode([conversation.conversation("here", row, schema)])
    assert bracketed(tokenizer, list(found.tokens), list(found.trained)) == chosen


def test_a_completion_of_several_turns_by_hand():
    """ "assistant" leaves out what the user says in between, "completion" does not."""
    turns = [("assistant", "b"), ("user", "c"), ("assistant", "d")]
    completion = [{"role": role, "content": text} for role, text in turns]
    row = {"prompt": "a", "chosen": completion, "rejected": "e"}
    tokenizer = make_tokenizer("gemma")
    found = [bracketed(tokenizer, *pair_tokens("gemma", row, on)[0]) for on in ("assistant", "completion")]
    begin = "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
    assert found == [
        begin + "[b<end_of_turn>]\n<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n[d<end_of_turn>]\n",
        begin + "[b<end_of_turn>\n<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\nd<end_of_turn>\n]",
    ]


def test_both_completions_begin_at_the_same_token():
    """The chosen answer's first line break is one token with the prompt's last, so both begin with that one."""
    row = {"prompt": "a", "chosen": "\nb", "rejected": "c"}
    tokenizer = make_tokenizer("chatml")
    begin = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant"
    found = [bracketed(tokenizer, *answer) for answer in pair_tokens("chatml", row, "completion")]
    assert found == [f"{begin}[\n\nb<|im_end|>\n]", f"{begin}[\nc<|im_end|>\n]"]
    found = [bracketed(tokenizer, *answer) for answer in pair_tokens("chatml", row, "assistant")]
    assert found == [f"{begin}[\n\nb<|im_end|>]\n", f"{begin}\n[c<|im_end|>]\n"]


# As TRL's training templates for Gemma and Qwen have it: the line break is inside the mark.
MARKED = {
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}": "[b<|im_end|>\n]",
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}": "[b<|im_end|>]\n",
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}": "[b<|im_end|>]\n",
}


@pytest.mark.parametrize("turn", MARKED)
def test_marks_decide_what_is_the_assistants_and_nothing_about_a_completion(turn):
    """As transformers' return_assistant_tokens_mask has it; where that leaves out the end of the turn, with that."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] + '<|im_end|>header ' }}"
        "{% else %}" + turn + "{% endif %}{% endfor %}"
    )
    row, found = {"prompt": "a", "completion": "b"}, {}
    for train_on in ("assistant", "completion"):
        schema = conversation.ChatSchema(train_on=train_on)
        said = conversation.conversation("here", row, schema)
        (encoded,) = chat_encoder.encoder(tokenizer, schema).encode([said])
        found[train_on] = bracketed(tokenizer, list(encoded.tokens), list(encoded.trained))
    assert found == {
        "assistant": "a<|im_end|>header " + MARKED[turn],
        "completion": "a<|im_end|>header [b<|im_end|>\n]",
    }
    expected = tokenizer.apply_chat_template(
        [*said.messages], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    theirs = bracketed(tokenizer, expected["input_ids"], [mark == 1 for mark in expected["assistant_masks"]])
    assert theirs.replace("[b]<|im_end|>", "[b<|im_end|>]") == found["assistant"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, Path]:
    """A family's name, and a folder with its tokenizer, random models and rows."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = make_tokenizer(request.param)
    tokenizer.save_pretrained(folder)
    save_models(folder, tokenizer)
    rows = [{"prompt": f"what is {n}?", "chosen": "yes " * (1 + n % 3), "rejected": f"n{'o' * n}"} for n in range(5)]
    jsonl(folder / "rows.jsonl", *rows)
    return request.param, folder


def load(folder: Path, task: str = "dpo", pad_token: str | None = None, **data) -> Task:
    recipe = make_recipe(
        folder,
        folder / "rows.jsonl",
        data={"packing": False, **data},
        tokenizer={"path": str(folder), "vocabulary_size": None, "pad_token": pad_token},
        batch={"global_batch_size": 1, "sequence_length": 128},
    )
    return registry.load_task(recipe.model_copy(update={"task": task}))


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_the_loss_and_its_gradient_are_those_of_a_plain_loop(family, train_on):
    """One sequence at a time, with torch and transformers alone."""
    name, folder = family
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / which) for which in ("policy", "reference"))
    policy.config.use_cache = reference.config.use_cache = False
    tokenizer = make_tokenizer(name)
    total = 0.0
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        ratios = []
        for answer in (row["chosen"], row["rejected"]):
            ids, start, end = answer_range(tokenizer, row["prompt"], answer)
            end = len(ids) if train_on == "completion" else end
            scores = [log_probability(model, ids, start, end) for model in (policy, reference)]
            ratios.append(scores[0] - scores[1].detach())
        total = total - functional.logsigmoid(0.1 * (ratios[0] - ratios[1])) / 5
    total.backward()
    expected = total.item(), norm_of(policy)
    policy.zero_grad()
    task = load(folder, train_on=train_on)
    arrays = task.train[np.arange(5)]
    inputs = {key: torch.from_numpy(value).flatten(0, 1) for key, value in arrays.inputs.items()}
    labels = torch.from_numpy(arrays.labels).flatten(0, 1)
    given = task.features(reference(**inputs).logits, labels).detach()
    loss = task.loss(policy(**inputs).logits, labels, reference=given) / task.count(labels)
    loss.backward()
    assert (loss.item(), norm_of(policy)) == pytest.approx(expected, rel=1e-5)


def answer_range(tokenizer, prompt: str, answer: str) -> tuple[list[int], int, int]:
    """The conversation's ids, where the answer begins, and where it ends, with the token that ends the turn."""
    asked = [{"role": "user", "content": prompt}]
    said = [*asked, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
    start = len(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])
    ends = [END_OF_TURN[name] for name, family in FAMILIES.items() if family[0] == tokenizer.chat_template]
    return ids, start, start + ids[start:].index(tokenizer.convert_tokens_to_ids(ends[0])) + 1


def log_probability(model, ids: list[int], start: int, end: int) -> torch.Tensor:
    found = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return sum(found[place - 1, ids[place]] for place in range(start, end))


def norm_of(model) -> float:
    return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt().item()


def test_a_reward_is_read_at_the_last_token_of_the_rendered_text(family):
    """So in ChatML and Gemma at the line break behind the end of the turn."""
    name, folder = family
    task, tokenizer = load(folder, "reward"), make_tokenizer(name)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scores")
    inputs = {key: torch.from_numpy(value).flatten(0, 1) for key, value in task.train[np.arange(5)].inputs.items()}
    scores = task.rewards(model(**inputs).logits, None).flatten().tolist()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for found, (row, which) in zip(scores, itertools.product(rows, ("chosen", "rejected")), strict=True):
        ids, _, end = answer_range(tokenizer, row["prompt"], row[which])
        states = model.model(input_ids=torch.tensor([ids]))[0]
        assert found == pytest.approx(model.score(states[0, -1]).item(), rel=1e-4)
        assert tokenizer.decode(ids[end:]) == ("" if name == "llama3" else "\n")


def test_scores_that_are_read_before_the_last_token_are_counted(family):
    """Where the token that ends the text pads, too: transformers takes it for padding, wherever it stands."""
    name, folder = family
    found = []
    for pad in (None, END_OF_TURN[name]):
        task = load(folder, "reward", pad_token=pad)
        found.append(task.describe()["scores_read_before_the_last_token"])
    assert found == [0, 10 if name == "llama3" else 0]


def test_what_is_trained_is_part_of_the_rows_fingerprint(family):
    """A run refuses to resume, and cached reference log-probabilities are not used, with other rows."""
    name, folder = family
    prints = [load(folder, train_on=train_on).train.fingerprint for train_on in ("assistant", "completion")]
    assert prints[0] != prints[1]


FORGETFUL = "{% for m in messages %}{{ loop.last ~ m['content'] }}<|im_end|>{% endfor %}"
ERRORS = [
    ({"messages": [{"role": "assistant", "content": "b"}]}, None,
     ("here", "'messages'", "whole conversation", "data.train_on=completion", "data.train_on=assistant")),
    ({"prompt": "a", "completion": [{"role": "assistant", "content": "b", "weight": 0}]}, None,
     ("here", "'completion'", "weight 0", "data.train_on=completion", "set it to assistant", "remove the weight")),
    ({"prompt": "a", "completion": "b"}, FORGETFUL,
     ("here", "message 1", "differently", "tokenizer.chat_template", "chatml")),
    ({"prompt": "a", "completion": "b"}, FORGETFUL.replace("loop.last ~", "").replace("<|im_end|>", ""),
     ("here", "'b'", "no special token", "none begins the next turn", "chatml")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "template", "told"), ERRORS)
def test_what_has_no_completion_is_an_error(row, template, told):
    tokenizer, schema = make_tokenizer("chatml"), conversation.ChatSchema(train_on="completion")
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(DataError) as caught:
        chat_encoder.encoder(tokenizer, schema).encode([conversation.conversation("here", row, schema)])
    check_message(str(caught.value), *told)
