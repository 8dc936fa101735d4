"""YAML and JSON that PyYAML reads in a way of its own: what a file says counts, and every mistake gets a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from samecurve.config.documents import Document, Place, parse_yaml, read_document


def parsed(text: str) -> tuple[object, Document]:
    document = Document("r.yaml")
    return parse_yaml(text, document), document


def test_a_control_character_is_a_problem_of_its_line():
    content, document = parsed("steps: 3\noutput_dir: a\x1bb\n")
    assert content == {} and document.incomplete
    (problem,) = document.problems
    assert problem.place == Place("r.yaml", 2) and "unacceptable character #x001b" in problem.text


def test_an_alias_to_a_block_that_overrides_another_is_no_duplicate():
    content, document = parsed("base: &base {lr: 1, seed: 2}\nfirst: &first {<<: *base, lr: 3}\nsecond: *first\n")
    assert not document.problems
    assert content == {"base": {"lr": 1, "seed": 2}, "first": {"lr": 3, "seed": 2}, "second": {"lr": 3, "seed": 2}}


def test_duplicates_are_found_once_however_often_a_block_is_used():
    _, document = parsed("first: &first {lr: 1, lr: 2}\nsecond: *first\n")
    assert [problem.key for problem in document.problems] == ["first.lr"]


def test_json_that_is_no_yaml_is_read_without_lines(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text(f'{{"{"k" * 2000}": 1,\n "a": "\x7f"}}')
    document = read_document(path)
    assert document.content["a"] == "\x7f" and not document.problems and not document.places


BOMBS = {
    "lists": "\n".join(["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]),
    "blocks": "\n".join(
        [
            "a0: &a0 {k: 1}",
            *(f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}" for n in range(1, 9)),
        ]
    ),
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_aliases_of_aliases_end_in_an_error(text):
    content, document = parsed(text)
    assert content == {} and len(text) < 2000
    assert "its aliases stand for more than 100,000 values" in document.problems[-1].text


@pytest.mark.parametrize("name", ["deep.yaml", "deep.json"])
def test_brackets_without_end(name, tmp_path):
    (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    assert read_document(tmp_path / name).problems[0].text.endswith(": nested too deeply")
