"""dpo and reward: pairs from rows, the rows that they become, and every way in which pairs cannot be used."""

# ruff: noqa: E501 - a message stands in one piece, so that a search for it finds it

from __future__ import annotations

import json

import numpy as np
import pytest
from report_cases import check_message
from test_conversations import text
from tiny_recipes import jsonl, make_recipe

from samecurve.data.batches import EvaluationBatches
from samecurve.data.datasets.base import grouped
from samecurve.data.datasets.preference import AnswerRows, ScoredRows
from samecurve.data.find import find_pairs
from samecurve.data.schemas import preference
from samecurve.data.schemas.preference import PairSchema
from samecurve.data.token_store import TokenStream
from samecurve.errors import DataError
from samecurve.specs.data_names import PREFERENCES
from samecurve.tasks import registry

PROMPT = [{"role": "user", "content": "a b"}]
GOOD = {"prompt": "a b", "chosen": "c", "rejected": "d d"}


def answer(content: str) -> list[dict]:
    return [{"role": "assistant", "content": content}]


def read(path, **schema) -> list[preference.Pair]:
    source = find_pairs(str(path), None, PairSchema(**schema))
    source.check()
    return list(source.documents())


@pytest.mark.parametrize(
    ("row", "schema"),
    [
        (GOOD, {}),
        ({"prompt": PROMPT, "chosen": answer("c"), "rejected": answer("d d")}, {}),
        ({"chosen": PROMPT + answer("c"), "rejected": PROMPT + answer("d d")}, {}),
        ({"prompt": "a b", "chosen": PROMPT + answer("c"), "rejected": PROMPT + answer("d d")}, {}),
        ({"question": "a b", "good": "c", "bad": "d d"}, {"prompt": "question", "chosen": "good", "rejected": "bad"}),
    ],
    ids=["text", "messages", "prompt inside", "prompt repeated", "named columns"],
)
def test_all_forms_of_a_pair_are_the_same_pair(tmp_path, row, schema):
    (found,) = read(jsonl(tmp_path / "a.jsonl", row), **schema)
    assert found.chosen.messages == (*PROMPT, *answer("c"))
    assert found.rejected.messages == (*PROMPT, *answer("d d"))
    assert found.chosen.num_prompt == found.rejected.num_prompt == 1
    (plain,) = read(jsonl(tmp_path / "b.jsonl", GOOD))
    assert str(found) == str(plain) and found.chosen.place == f"{tmp_path}/a.jsonl:1"


@pytest.mark.parametrize("begin", [[], [{"role": "system", "content": "s"}]])
@pytest.mark.parametrize("space", ["", " "])
def test_a_prompt_that_is_text_may_stand_in_the_answers_again(begin, space, tmp_path):
    """With a system turn before it, as distilabel writes it, or without the space behind it."""
    before = [*begin, {"role": "user", "content": "a"}]
    row = {"prompt": f"a{space}", "chosen": [*before, *answer("c")], "rejected": [*before, *answer("d")]}
    (found,) = read(jsonl(tmp_path / "a.jsonl", row))
    assert [list(one.messages) for one in (found.chosen, found.rejected)] == [row["chosen"], row["rejected"]]
    assert found.chosen.num_prompt == found.rejected.num_prompt == len(before)


def test_texts_without_a_template_share_their_beginning_but_no_space_at_its_end(tmp_path):
    rows = [{"chosen": "2+2? four", "rejected": "2+2? 5"}, {"chosen": "Q\nA:yes", "rejected": "Q\nA:no"}]
    found = read(jsonl(tmp_path / "a.jsonl", *rows), chat=False)
    contents = [
        [m["content"] for pair in both for m in pair.messages] for both in ((p.chosen, p.rejected) for p in found)
    ]
    assert contents == [["2+2?", " four", "2+2?", " 5"], ["Q\nA:", "yes", "Q\nA:", "no"]]


def test_a_pair_of_several_turns_shares_the_turns_before_the_last(tmp_path):
    before = [*PROMPT, *answer("x"), {"role": "user", "content": "more"}]
    (found,) = read(jsonl(tmp_path / "a.jsonl", {"chosen": before + answer("c"), "rejected": before + answer("d")}))
    assert found.chosen.num_prompt == 3
    path = jsonl(tmp_path / "b.jsonl", *[{"chosen": before + answer("c"), "rejected": before + answer("d")}] * 2)
    task = registry.load_task(recipe(tmp_path, path))
    labels = task.train[np.array([0])].labels[0]
    decoded = [task.tokenizer.decode(line[line != -100]) for line in labels]
    assert decoded == ["c<|im_end|>", "d<|im_end|>"]  # not the answer in the prompt


def recipe(folder, path, task="dpo", **sections):
    sections["data"] = {"packing": False, **sections.get("data", {})}
    return make_recipe(folder, path, task, **sections)


def test_rows_are_what_the_template_makes_of_each_answer(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GOOD, {**GOOD, "rejected": "e"})
    task = registry.load_task(recipe(tmp_path, path, tokenizer={"vocabulary_size": 260}))
    arrays = task.train[np.array([0, 1])]
    ids, labels = arrays.inputs["input_ids"], arrays.labels
    assert ids.shape == labels.shape == (2, 2, 64)
    for row, other in enumerate(("d d", "e")):
        for which, content in enumerate(("c", other)):
            text = task.tokenizer.apply_chat_template(PROMPT + answer(content), tokenize=False)
            expected = task.tokenizer(text, add_special_tokens=False)["input_ids"]
            size = len(expected) - 1
            assert ids[row, which, :size].tolist() == expected[:-1]
            trained = labels[row, which] != -100
            assert labels[row, which][trained].tolist() == [expected[i + 1] for i in np.flatnonzero(trained).tolist()]
            assert task.tokenizer.decode(labels[row, which][trained]) == content + "<|im_end|>"
    assert task.train.num_inputs(np.array([0])) == sum(
        len(
            task.tokenizer(
                task.tokenizer.apply_chat_template(PROMPT + answer(c), tokenize=False), add_special_tokens=False
            )["input_ids"]
        )
        - 1
        for c in ("c", "d d")
    )
    assert task.describe()["train"]["documents"] == task.describe()["train"]["rows"] == 2


def test_a_token_that_pads_is_asked_for_before_anything_is_tokenised(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    tokenizer = registry.load_task(recipe(tmp_path, path, "reward")).tokenizer
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    capsys.readouterr()

    def load(**more):
        chosen = {"path": str(tmp_path / "tokenizer"), "vocabulary_size": None, **more}
        given = make_recipe(tmp_path, path, data={"packing": False}, tokenizer=chosen)
        return registry.load_task(given.model_copy(update={"task": "reward"}))

    with pytest.raises(DataError, match="no pad_token; set tokenizer.pad_token to one of its tokens"):
        load()
    assert capsys.readouterr().out == ""
    task = load(pad_token="<|im_end|>")
    assert task.head.fields["pad_token_id"] == task.tokenizer.eos_token_id


def test_reward_rows_hold_the_whole_text_and_say_what_is_padding(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    task = registry.load_task(recipe(tmp_path, path, "reward"))
    arrays = task.train[np.array([0])]
    for which, content in enumerate(("c", "d d")):
        text = task.tokenizer.apply_chat_template(PROMPT + answer(content), tokenize=False)
        kept = arrays.inputs["attention_mask"][0, which] == 1
        expected = task.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert arrays.inputs["input_ids"][0, which][kept].tolist() == expected
    assert arrays.labels.tolist() == [0]


def test_a_margin_that_reward_would_not_read_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {**GOOD, "margin": 0.5}, {**GOOD, "prompt": "c d", "margin": None})
    with pytest.raises(DataError) as caught:
        registry.load_task(recipe(tmp_path, path, "reward"))
    check_message(str(caught.value), str(path), "'margin'", "1 row has one", "data.ignore_columns=[margin]")
    data = {"ignore_columns": ["margin"]}
    assert len(registry.load_task(recipe(tmp_path, path, "reward", data=data)).train) == 2
    assert len(registry.load_task(recipe(tmp_path, path)).train) == 2  # DPO's loss has no margins


def stream(*pairs: tuple[list[int], list[int]], prompt: int = 2) -> TokenStream:
    """Token ids of both answers; the first `prompt` tokens of each are not trained."""
    sequences = [sequence for pair in pairs for sequence in pair]
    tokens = np.concatenate(sequences)
    trained = np.concatenate([np.arange(len(s)) >= prompt for s in sequences]).astype(np.uint8)
    segments = np.concatenate([np.full(len(s), index % 2) for index, s in enumerate(sequences)]).astype(np.uint8)
    offsets = np.cumsum([0, *(len(a) + len(b) for a, b in pairs)])
    return TokenStream(tokens, offsets, "s", trained, segments)


def test_what_a_cut_leaves_nothing_to_compare_of_is_dropped_and_counted():
    """Rows of 4 places, so 5 tokens: the second pair's answers differ behind that, the third one's prompt fills it."""
    pairs = ([1, 2, 3], [1, 2, 4, 5]), ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]), ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9])
    rows = AnswerRows(stream(*pairs), 4, 0)
    assert (len(rows), rows.num_dropped, rows.num_truncated, rows.num_truncated_tokens) == (2, 1, 2, 4)
    assert rows[np.array([0])].inputs["input_ids"][0].tolist() == [[1, 2, 0, 0], [1, 2, 4, 0]]
    assert rows[np.array([0])].labels[0].tolist() == [[-100, 3, -100, -100], [-100, 4, 5, -100]]
    assert rows[np.array([1])].labels[0].tolist() == [[-100, 3, 4, 5], [-100, 9, -100, -100]]
    assert rows.trained_share == 7 / 11 and rows.num_inputs(np.array([0, 1])) == 11
    assert rows.num_inputs(np.array([0, 1])) == 2 + 3 + 4 + 2
    long_prompt = AnswerRows(stream(*pairs, prompt=5), 4, 0)
    assert (len(long_prompt), long_prompt.num_dropped) == (0, 3)
    scored = ScoredRows(stream(*pairs), 4, 0)
    assert (len(scored), scored.num_dropped, scored.num_truncated) == (2, 1, 2)
    assert scored[np.array([1])].inputs["input_ids"][0].tolist() == [[1, 2, 3, 4], [1, 2, 9, 0]]


@pytest.mark.parametrize(
    ("truncation", "kept", "counts"),
    [
        ("left", [[[1, 2], [1, 2, 4]], [[3, 4, 5, 6], [1, 2]]], (2, 5, 1)),  # TRL's keep_end: ids[-5:]
        ("drop", [[[1, 2], [1, 2, 4]]], (0, 0, 2)),
    ],
)
def test_the_end_or_nothing_of_long_pairs(truncation, kept, counts):
    """Rows of 4 places, so 5 tokens: the second pair's chosen answer has 7; the third one's differ in their beginnings."""
    pairs = ([1, 2, 3], [1, 2, 4, 5]), ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9]), ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6])
    rows = AnswerRows(stream(*pairs), 4, 0, truncation)
    arrays = rows[np.arange(len(rows))]
    assert arrays.inputs["input_ids"].tolist() == [[ids + [0] * (4 - len(ids)) for ids in pair] for pair in kept]
    assert (rows.num_truncated, rows.num_truncated_tokens, rows.num_dropped) == counts
    if truncation == "left":
        assert arrays.labels[1].tolist() == [[4, 5, 6, 7], [-100, 9, -100, -100]]
        scored = ScoredRows(stream(*pairs), 4, 0, truncation)  # 4 tokens
        assert scored[np.array([1])].inputs["input_ids"][0].tolist() == [[4, 5, 6, 7], [1, 2, 9, 0]]
    assert rows.fingerprint != AnswerRows(stream(*pairs), 4, 0).fingerprint


def test_pairs_of_like_length_go_together_and_fill_up_pairs_count_nowhere():
    pairs = [(list(range(3 + n % 40)), list(range(1, 5 + n % 40))) for n in range(64)]
    rows = grouped(AnswerRows)(stream(*pairs), 64, 0, global_batch_size=4)
    step = rows.at_positions(np.arange(4), 0)
    assert np.ptp(rows.sizes[step]) <= 8
    batches = EvaluationBatches(AnswerRows(stream(*pairs[:3]), 64, 0), 2, (1, 2))
    assert [(batch.labels.flatten(1) != -100).any(dim=1).sum() >= 1 for batch in batches] == [True]


@pytest.mark.full
def test_the_standard_library_is_pairs_and_they_are_always_the_same(tmp_path):
    found = read(PREFERENCES)
    assert 3000 < len(found) < 12000
    assert all(pair.chosen.messages[0] == pair.rejected.messages[0] for pair in found)
    answers = [(pair.chosen.messages[1]["content"], pair.rejected.messages[1]["content"]) for pair in found]
    assert all(bad.strip() and bad.strip() != good for good, bad in answers)
    again = read(PREFERENCES)
    assert list(map(str, found[:500])) == list(map(str, again[:500]))
    # of each kind of damage a good part
    shorter = sum(bad.count("\n") < good.count("\n") for good, bad in answers)
    lines = [[sorted(line.strip() for line in answer.split("\n")) for answer in both] for both in answers]
    swapped = sum(good == bad for good, bad in lines)
    assert shorter > len(found) / 10 and swapped > len(found) / 10


LINE = json.dumps(GOOD) + "\n"
HERE = "T/a.jsonl:2"


def row(**values):
    """A good row, then this one."""
    return text(LINE, json.dumps({**GOOD, **values}) + "\n")


def bare(**values):
    return text(LINE, json.dumps(values) + "\n")


CASES = {
    "the same": (row(rejected="c"), {}, (HERE, "'chosen' and 'rejected'", "the same", "'c'", "correct or remove the row")),
    "the same messages": (bare(chosen=PROMPT + answer("c"), rejected=PROMPT + answer("c")), {}, (HERE, "'chosen' and 'rejected'", "the same", "'c'")),
    "empty answer": (row(rejected=" \n"), {}, (HERE, "rejected", "empty", "fill or remove the row")),
    "empty prompt": (row(prompt=""), {}, (HERE, "prompt", "empty", "fill or remove the row")),
    "answer is null": (row(chosen=None), {}, (HERE, "chosen", "None", "text or a list of messages", "correct or remove the row")),
    "no messages": (row(rejected=[]), {}, (HERE, "'rejected'", "[]", "list of messages", '[{"role": "user"')),
    "weight": (row(chosen=[*answer("x"), PROMPT[0], {**answer("y")[0], "weight": 0}]), {}, (HERE, "'chosen'", "weight 0", "whole answers", "remove the weight or the row")),
    "unpaired": (bare(prompt="a", completion="b", label=True), {}, (HERE, "'chosen' and 'rejected'", "found: prompt, completion, label", "task=dpo dpo.loss=kto", "bad_rows=drop")),
    "no such column": (text(json.dumps({"prompt": "a", "choosen": "b", "rejected": "c"})), {}, ("T/a.jsonl:1", "'chosen'", "found: prompt, choosen, rejected", "did you mean data.chosen_column=choosen")),
    "two columns": (bare(prompt="a", good="b", bad="c"), {}, (HERE, "'chosen' and 'rejected'", "found: prompt, good, bad", "add it, or remove the row")),
    "named prompt": (text(LINE), {"prompt_column": "question"}, ("T/a.jsonl:1", "'question'", "found: prompt, chosen, rejected", "name the columns with data.prompt_column")),
    "misspelt prompt": (bare(promt="a", chosen="b", rejected="c"), {}, (HERE, "'chosen' and 'rejected'", "text", "no column 'prompt'", "data.prompt_column", "messages", "data.chat=false")),
    "other prompts": (bare(chosen=PROMPT + answer("c"), rejected=[{"role": "user", "content": "x"}, *answer("d")]), {}, (HERE, "'chosen' and 'rejected'", "same message", "data.prompt_column")),
    "nothing behind the prompt": (bare(chosen=PROMPT + answer("c"), rejected=PROMPT), {}, (HERE, "'rejected'", "no answer after the prompt", "remove the row")),
    "the user answers": (row(chosen=PROMPT), {}, (HERE, "'chosen'", "no assistant turn", "roles there: user", "correct or remove the row")),
    "texts begin differently": (bare(chosen="ab", rejected="cd"), {"chat": False}, (HERE, "'chosen' and 'rejected'", "same character", "data.prompt_column")),
    "messages without a template": (bare(prompt="a", chosen=answer("c"), rejected="d"), {"chat": False}, (HERE, "chosen", "[{'role': 'assistant', 'content': 'c'}]", "not text")),
    "half a character": (text(LINE, LINE.replace('"c"', '"c\\ud83d"')), {}, (HERE, "'chosen'", "lone surrogate")),
    "no row": (text(), {}, ("T/a.jsonl", "no rows", "each line of a jsonl file", "one pair of answers")),
    "all cut": (text(LINE), {"length": 2}, ("T/a.jsonl", "0 training rows", "batch.sequence_length=2")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_used_is_told_with_its_place_and_its_fix(tmp_path, name):
    write, options, row = CASES[name]
    data = {key: value for key, value in options.items() if key not in ("batch", "length")}
    batch = {"global_batch_size": options.get("batch", 1), "sequence_length": options.get("length", 64)}
    with pytest.raises(DataError) as caught:
        registry.load_task(recipe(tmp_path, write(tmp_path), data=data, batch=batch))
    check_message(str(caught.value).replace(str(tmp_path), "T"), *row)
    assert caught.value.exit_code == 3
