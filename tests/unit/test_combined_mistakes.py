"""A mistake is reported whatever else is wrong: the tables of mistakes again, with every other recipe key wrong."""

from __future__ import annotations

import json
import re

import pytest
import test_config
import test_strategy_reports
from harness import long
from report_cases import message, write

from samecurve.config.inheritance import ALTERNATIVES
from samecurve.config.schema import Recipe
from samecurve.config.source import schema_paths

WRONG = [[1]]  # for every key: none of them is a list of lists
PATHS = [path for path in schema_paths(Recipe) if "*" not in path]
LEAVES = sorted(".".join(path) for path in PATHS if not any(other[:-1] == path for other in PATHS))
TABLES = test_config.CASES, test_strategy_reports.CASES
CASES = {name: case for table in TABLES for name, *case in table if case[1][0] == "r.yaml"}
MEASURED = [
    *("data.path", "data.mixture", "data.pattern", "data.split", "data.config", "data.revision"),
    *("evaluate.path", "evaluate.config", "evaluate.revision"),
]
TRAINED_FILES = "the file that is trained on", "a file of the folder that is trained on", "a folder of a source"
# What a finding rests on without naming it.
NEEDED = {
    "no data": ["task", "data.source"],
    "empty": ["task", "data.source"],
    "positions of a folder": ["model.overrides"],
    "an adapter": ["adapter.path"],
    "model of an adapter": ["adapter.path"],
    "truncation of a stream": ["task"],
    "keep what is one row": ["data.chat"],
    "variables of no template": ["data.messages_column"],
    "epochs of a mixture": ["data.streaming"],
    "resume best": ["output_dir"],
    "a column twice": ["data.positive_column"],
    "wsd none": ["schedule.name"],
    "wsd long": ["schedule.name", "schedule.warmup_steps"],
    "batch ranks": ["batch.micro_batch_size"],
    "pipeline: bf16 without zero": ["precision"],
    "eval": ["evaluate.split"],
    "the split that is trained on": MEASURED,
    "the split that is trained on, in other words": MEASURED,
    "the split that is trained on, of a URL": MEASURED,
    **dict.fromkeys(TRAINED_FILES, [*MEASURED, "output_dir"]),
    "a split beside files": ["evaluate.path"],
    "a split beside a file": ["evaluate.path", "data.pattern"],
    "the hub's keys of a file": ["data.mixture"],
    "the hub's keys of what is built in": ["data.mixture"],
    "a revision of a URL": ["data.mixture"],
    "another revision to measure on": MEASURED,
    "no split to measure on": ["evaluate.split", "data.pattern"],
    "a config that nothing reads": ["evaluate.path", "evaluate.split"],
}


def taking_part(name: str, argv: list[str], lines: list[str]) -> set[str]:
    """The keys that the lines of a report name, or that the case gives itself."""
    # an alternative takes the place of what the file says
    found = {".".join(key) for pair in ALTERNATIVES for key in pair} | set(NEEDED.get(name, ()))
    given = [argument.partition("=")[0] for argument in argv if "=" in argument]
    about = [match[1] for line in lines if (match := re.match(r"[^ ]+?(?: line)?: ([a-z_.0-9]+): ", line))]
    for key in LEAVES:
        blocks = [key, *(key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))]
        named = any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", line) for line in lines)
        if named or any(other in (*given, *about) for other in blocks) or any(g.startswith(f"{key}.") for g in given):
            found.add(key)
    return found


def wrong(keys: list[str]) -> str:
    """A recipe on top of r.yaml."""
    content: dict = {"base": "r.yaml"}
    for key in keys:
        *blocks, last = key.split(".")
        block = content
        for name in blocks:
            block = block.setdefault(name, {})
        block[last] = WRONG
    return json.dumps(content, indent=1)  # JSON is YAML


def test_every_key_can_be_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"w.yaml": wrong(LEAVES)})
    assert len(LEAVES) > 90
    report, _ = message(tmp_path, ["w.yaml"], {})
    for key in LEAVES:
        assert re.search(rf"w.yaml:\d+: {key}(\.0)*: found a list", report), key


@pytest.mark.parametrize("name", [*list(CASES)[::5], *long(*(name for nth, name in enumerate(CASES) if nth % 5))])
def test_another_mistake_hides_nothing(name, tmp_path, monkeypatch):
    files, argv, environ, rows, *_ = CASES[name]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    lines = [line.strip() for line in message(tmp_path, argv, environ)[0].splitlines()[1:]]
    assert len(lines) == len(rows)
    others = [key for key in LEAVES if key not in taking_part(name, argv, lines)]
    assert len(others) > 40
    (tmp_path / "w.yaml").write_text(wrong(others))
    report, _ = message(tmp_path, ["w.yaml", *argv[1:]], environ)
    found = [re.sub(r"^r\.yaml(:\d+)?: ", "", line) for line in lines]  # its blocks have another place in w.yaml
    assert [line for line in found if f" {line}\n" not in f"{report}\n"] == []
