"""SECURITY.md: each row of the table names tests that exist, or promises nothing."""

from __future__ import annotations

import ast
import re

from pages import ROOT, text

ROWS = re.findall(r"^\| ([^|]+) \|[^|]+\|([^|]+)\|([^|]+)\|$", text("SECURITY.md"), re.MULTILINE)[1:]


def missing(named: str) -> list[str]:
    """The tests of a cell, FILE::NAME below tests/, that do not exist."""
    wrong = []
    for file, name in re.findall(r"`([\w/.]+)::(\w+)`", named):
        path = ROOT / "tests" / file
        functions = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in functions):
            wrong.append(f"{file}::{name}")
    return wrong


def test_every_row_names_tests_or_promises_nothing():
    assert len(ROWS) == 14
    for who, promise, named in ROWS:
        assert missing(named) == []
        assert ("::" in named) != (named.strip() == "no test" and promise.strip() == "nothing is promised"), who


def test_a_missing_test_is_seen():
    assert missing("`unit/test_yaml.py::test_nothing` `unit/test_none.py::test_a`") == [
        "unit/test_yaml.py::test_nothing",
        "unit/test_none.py::test_a",
    ]
