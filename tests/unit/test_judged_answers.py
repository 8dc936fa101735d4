"""Rows of KTO: an answer and whether it is good, in the formats that people have, and what they are trained as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from report_cases import check_message
from tiny_recipes import jsonl, make_recipe

from samecurve.data.find import find_pairs
from samecurve.data.schemas.judged import JudgedSource
from samecurve.data.schemas.preference import PairSchema
from samecurve.errors import DataError
from samecurve.tasks import registry

ASKED = [{"role": "user", "content": "a b"}]
ANSWER = [{"role": "assistant", "content": "c"}]
BEFORE = [*ASKED, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
# the forms that TRL, LLaMA-Factory and ms-swift read
FORMS = {
    "text": {"prompt": "a b", "completion": "c", "label": True},
    "messages": {"prompt": ASKED, "completion": ANSWER, "label": True},
    "conversation": {"messages": ASKED + ANSWER, "label": True},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}],
        "kto_tag": True,
    },
    "alpaca": {"instruction": "a b", "input": "", "output": "c", "kto_tag": "true"},
}


def read(folder, *rows, **schema) -> list:
    source = find_pairs(str(jsonl(folder / "a.jsonl", *rows)), None, PairSchema(**schema), kind=JudgedSource)
    source.check()
    return list(source.documents())


def load(folder, *rows, length: int = 64, **data) -> Any:
    sections = {"dpo": {"loss": "kto"}, "data": {"packing": False, **data}}
    recipe = make_recipe(folder, jsonl(folder / "b.jsonl", *rows), batch={"sequence_length": length}, **sections)
    return registry.load_task(recipe.model_copy(update={"task": "dpo"}))


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_an_answer_are_the_same(form, tmp_path):
    (found,) = read(tmp_path, FORMS[form])
    assert found.conversation.messages == (*ASKED, *ANSWER)
    assert (found.conversation.num_prompt, found.is_good) == (1, True)


def test_of_a_conversation_the_last_turn_is_judged(tmp_path):
    (found,) = read(tmp_path, {"messages": BEFORE + ANSWER, "label": False})
    assert (found.conversation.num_prompt, found.is_good) == (3, False)


BAD = {
    "verdict": ({**FORMS["text"], "label": "maybe"}, ("'label'", "'maybe'", "true")),
    "no verdict": ({"prompt": "a", "completion": "b"}, ("no column 'label'", "'chosen' and 'rejected'")),
    "the user's turn": ({"messages": [*ASKED, *ANSWER, ASKED[0]], "label": True}, ("no assistant turn", "user")),
    "tokens": ({"input_ids": [1, 2], "labels": [-100, 2], "label": True}, ("'input_ids'", "prompt and completion")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used(name, tmp_path):
    row, fragments = BAD[name]
    with pytest.raises(DataError) as caught:
        read(tmp_path, FORMS["text"], row)
    check_message(str(caught.value), f"{tmp_path}/a.jsonl:2", *fragments)


def words(task, ids: np.ndarray) -> str:
    return task.tokenizer.decode(ids[ids != -100])


def test_a_row_is_the_answer_and_the_one_before_it_to_the_same_prompt(tmp_path):
    rows = [{"prompt": f"{letter}?", "completion": letter * 3, "label": letter != "e"} for letter in "abcde"]
    task = load(tmp_path, *rows)
    arrays = task.train[np.arange(5)]
    answers = [[words(task, labels) for labels in both] for both in arrays.labels]
    assert answers == [[f"{letter * 3}<|im_end|>" for letter in both] for both in ("ae", "ba", "cb", "dc", "ed")]
    assert arrays.targets["is_good"].tolist() == [1, 1, 1, 1, 0]
    for own, (first, second) in zip("abcde", arrays.inputs["input_ids"], strict=True):
        assert f"{own}?" in task.tokenizer.decode(first) and f"{own}?" in task.tokenizer.decode(second)


def test_a_pair_is_two_answers_of_one_side_of_the_split(tmp_path):
    rows = [{"prompt": f"{letter}?", "chosen": letter * 2, "rejected": letter} for letter in "abcdefghijkl"]
    task = load(tmp_path, *rows, validation_fraction=0.3)
    for part in (task.train, task.validation):
        arrays = part[np.arange(len(part))]
        assert arrays.targets["is_good"].tolist() == [1, 0] * (len(part) // 2)
        said = [words(task, labels)[0] for labels in arrays.labels[:, 0]]
        assert said[::2] == said[1::2]


def wrong_answers(task) -> list[str]:
    arrays = task.train[np.arange(len(task.train))]
    return [words(task, labels).removesuffix("<|im_end|>") for labels in arrays.labels[:, 1]]


def test_the_wrong_answer_is_one_to_another_prompt(tmp_path):
    pairs = [{"prompt": f"{letter}?", "chosen": letter * 2, "rejected": letter} for letter in "abc"]
    assert wrong_answers(load(tmp_path, *pairs)) == ["cc", "c", "aa", "a", "bb", "b"]
    more = {"prompt": "b?", "chosen": "yy", "rejected": "y"}
    assert wrong_answers(load(tmp_path, *pairs[:2], more)) == ["bb", "b", "aa", "a", "aa", "a"]
    # the last prompt is the first one again
    assert wrong_answers(load(tmp_path, *pairs[:2], {**more, "prompt": "a?"})) == ["bb", "b", "aa", "a", "bb", "b"]
    # of a single prompt there is only an answer to itself
    assert wrong_answers(load(tmp_path, pairs[0], {**more, "prompt": "a?"})) == ["y", "aa", "a", "yy"]


def test_answers_without_a_trained_token_are_left_out(tmp_path):
    rows = [FORMS["text"], {**FORMS["text"], "prompt": "long " * 40}, {**FORMS["text"], "label": False}]
    task = load(tmp_path, *rows, length=32)
    assert (len(task.train), task.train.num_dropped) == (2, 1)
    assert [words(task, labels) for labels in task.train[np.arange(2)].labels[:, 1]] == ["c<|im_end|>"] * 2
