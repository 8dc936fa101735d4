"""Rows of the same prompt stand on one side of the held-out split, and rows without a prompt on both."""

from __future__ import annotations

import pytest
from tiny_recipes import jsonl

from samecurve.config.schema import Data
from samecurve.data import sources
from samecurve.data.find import find_examples, find_labelled_words, find_matches, find_pairs
from samecurve.data.schemas.judged import JudgedSource
from samecurve.data.schemas.preference import PairSchema

SYSTEM = {"role": "system", "content": "Be brief."}


def examples(path, **columns):
    return find_examples(Data(path=path, **columns), None, sources.WHOLE)


def words(path, steps: bool):
    columns = {"words_column": "completions", "label_column": "labels"} if steps else {}
    columns |= {"text_column": "prompt"} if steps else {}
    return find_labelled_words(Data(path=path, **columns), None, sources.WHOLE, steps)


def said(content: str) -> list[dict]:
    return [{"role": "assistant", "content": content}]


# how rows are read; a row of a prompt and an answer
PROMPTED = {
    "pairs": (
        lambda path: find_pairs(path, None, PairSchema()),
        lambda prompt, answer: {"prompt": prompt, "chosen": answer, "rejected": "no"},
    ),
    "judged answers": (
        lambda path: find_pairs(path, None, PairSchema(), kind=JudgedSource),
        lambda prompt, answer: {"prompt": prompt, "completion": answer, "label": True},
    ),
    "steps": (
        lambda path: words(path, steps=True),
        lambda prompt, answer: {"prompt": prompt, "completions": [answer], "labels": [True]},
    ),
    "pairs of texts": (
        lambda path: examples(path, text_pair_column="answer"),
        lambda prompt, answer: {"text": prompt, "answer": answer, "label": 1},
    ),
    "matches": (
        lambda path: find_matches(path, Data(path=path)),
        lambda prompt, answer: {"anchor": prompt, "positive": answer},
    ),
}
UNPROMPTED = {
    "pairs": (
        lambda path: find_pairs(path, None, PairSchema()),
        lambda nth: {"chosen": [SYSTEM, *said(f"good {nth}")], "rejected": [SYSTEM, *said(f"bad {nth}")]},
    ),
    "judged answers": (
        lambda path: find_pairs(path, None, PairSchema(), kind=JudgedSource),
        lambda nth: {"messages": [SYSTEM, *said(f"answer {nth}")], "label": True},
    ),
    "words": (lambda path: words(path, steps=False), lambda nth: {"tokens": [f"word {nth}"], "label": ["x"]}),
    "texts": (examples, lambda nth: {"text": f"text {nth}", "label": 1}),
}


def sides(source, fraction: float = 0.5) -> list[bool]:
    source.check()
    return [sources.is_held_out(document, fraction) for document in source.documents()]


@pytest.mark.parametrize("kind", PROMPTED)
def test_rows_of_one_prompt_are_on_one_side(kind, tmp_path):
    find, row = PROMPTED[kind]
    rows = [row(f"question {nth}", f"answer {answer}") for nth in range(20) for answer in range(3)]
    found = sides(find(str(jsonl(tmp_path / "a.jsonl", *rows))))
    assert found[::3] == found[1::3] == found[2::3]
    assert 5 <= sum(found[::3]) <= 15


@pytest.mark.parametrize("kind", UNPROMPTED)
def test_rows_without_a_prompt_are_on_both_sides(kind, tmp_path):
    find, row = UNPROMPTED[kind]
    found = sides(find(str(jsonl(tmp_path / "a.jsonl", *map(row, range(60))))))
    assert 15 <= sum(found) <= 45
