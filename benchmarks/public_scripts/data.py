"""Small data under the names that the scripts ask for, and a package in the place of `evaluate`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [one + two for one in ("ba", "de", "ki", "lo", "mu", "sa", "te", "vo") for two in ("n", "ra", "sti", "l", "ko")]
GLUE_ROWS, OTHER_ROWS, LINES, HELD_OUT = 203, 96, 600, 24
GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: mrpc/train.jsonl}
  - {split: validation, path: mrpc/validation.jsonl}
  - {split: test, path: mrpc/test.jsonl}
dataset_info:
- config_name: mrpc
  features:
  - {name: sentence1, dtype: string}
  - {name: sentence2, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': not_equivalent, '1': equivalent}}}}
  - {name: idx, dtype: int32}
---
"""
# found before the package of this name; of it the scripts use `load`, and of a metric these methods
EVALUATE = '''\
"""Stands in for the package `evaluate`, whose metrics are in the hub: counts nothing."""


class Metric:
    def add_batch(self, **_):
        pass

    def compute(self, **_):
        return {}


def load(*_, **__):
    return Metric()
'''
TPU = '''\
"""Gives the scripts a name that accelerate no longer has."""

from accelerate import DistributedType

DistributedType.TPU = DistributedType.XLA
'''


class Rows:
    """Draws rows of each kind of data; of words, whose number differs from row to row."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def words(self, least: int = 3, most: int = 12) -> list[str]:
        return self._draw.choices(WORDS, k=self._draw.randint(least, most))

    def text(self) -> str:
        return " ".join(self.words())

    def glue(self, index: int) -> dict[str, Any]:
        return {"sentence1": self.text(), "sentence2": self.text(), "label": self._draw.randrange(2), "idx": index}

    def ner(self, _: int) -> dict[str, Any]:
        words = self.words()
        return {"tokens": words, "ner_tags": ["B-PER" if word[0] in "bd" else "O" for word in words]}

    def swag(self, _: int) -> dict[str, Any]:
        endings = {f"ending{number}": self.text() for number in range(4)}
        return {"sent1": self.text(), "sent2": self.text(), **endings, "label": self._draw.randrange(4)}

    def squad(self, index: int) -> dict[str, Any]:
        words = self.words(5, 30)
        answer = self._draw.randrange(len(words))
        place = {"text": [words[answer]], "answer_start": [len(" ".join([*words[:answer], ""]))]}
        return {"id": str(index), "question": self.text(), "context": " ".join(words), "answers": place}


def lines_of(kind: Callable[[int], dict[str, Any]], count: int) -> str:
    return "".join(json.dumps(kind(index)) + "\n" for index in range(count))


def write_data(folder: Path) -> None:
    """Files for training and for evaluation; GLUE's in a folder of the data set's name in the hub."""
    glue = folder / "nyu-mll" / "glue"
    (glue / "mrpc").mkdir(parents=True)
    (glue / "README.md").write_text(GLUE)
    counts = {"train": (GLUE_ROWS, OTHER_ROWS), "validation": (HELD_OUT, HELD_OUT), "test": (HELD_OUT, HELD_OUT)}
    for seed, (split, (glue_rows, other_rows)) in enumerate(counts.items(), start=1):
        rows = Rows(seed)
        (glue / "mrpc" / f"{split}.jsonl").write_text(lines_of(rows.glue, glue_rows))
        for kind in (rows.ner, rows.swag):
            (folder / f"{kind.__name__}_{split}.json").write_text(lines_of(kind, other_rows))
        squad = {"data": [rows.squad(index) for index in range(other_rows)]}
        (folder / f"squad_{split}.json").write_text(json.dumps(squad))
    lines = Rows(3)
    (folder / "text.txt").write_text("".join(f"{lines.text()}\n" for _ in range(LINES)))


def write_packages(folder: Path) -> None:
    """Folders for PYTHONPATH: `evaluate` for all scripts, `tpu` for those that name DistributedType.TPU."""
    for name, file, text in (("evaluate", "evaluate.py", EVALUATE), ("tpu", "sitecustomize.py", TPU)):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(text)
