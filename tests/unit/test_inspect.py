from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_recipes import jsonl, recipe_file

from samecurve.cli import commands
from samecurve.reports.inspect_console import bar_of

SHORT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c <b>"}]
LONG = [*SHORT, {"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y"}]


@pytest.fixture
def recipe(tmp_path) -> str:
    chats = jsonl(tmp_path / "chats.jsonl", *({"messages": messages} for messages in (SHORT, LONG, SHORT)))
    return recipe_file(tmp_path, chats, tokenizer={"vocabulary_size": 260}, batch={"sequence_length": 70})


def test_samples_and_counts_by_hand(recipe, capsys):
    """One token per byte and marker: a short chat has 1 + (8 + 2) + (13 + 5) = 29 tokens, the long one 29 + 48 + 14."""
    assert commands.main(["inspect", recipe, "--samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "sample 1: 29 tokens, 6 trained\n<|begin_of_text|><|im_start|>user\nab<|im_end|>\n" in out
    assert "<|im_start|>assistant\n⟦c <b><|im_end|>⟧\n" in out
    assert "sample 2: 71 tokens, 6 trained, 20 more cut off" in out
    values = dict(re.findall(r"^ {0,2}(\w[\w ]*?)  +(\S.*)$", out, re.MULTILINE))
    assert values["rows"] == "2 of 70 tokens"
    assert values["tokens"] == "149"
    assert values["trained tokens"] == "18 (12.1%)"
    assert values["padding"] == "14 (10.0%)"
    assert values["truncated documents"] == "1 (33.3%), 20 tokens"
    assert values["dropped documents"].startswith("0 (0.0%)")
    assert values["exact duplicates"] == "1 (33.3%)"
    assert values["last trained token"] == "'<|im_end|>' 2, cut off 1"
    assert values["answers begun inside a token"] == "0"
    assert "64-127  ████████████████████ 1 (1 too long)" in out


@pytest.mark.parametrize(
    ("truncation", "sample", "ends"),
    [("left", "71 tokens, 8 trained, 20 more", "'<|im_end|>' 3"), ("drop", "0 tokens, 0 trained, 91", "2, cut off 1")],
)
def test_other_truncations(recipe, capsys, truncation, sample, ends):
    assert commands.main(["inspect", recipe, "--samples", "2", f"data.truncation={truncation}"]) == 0
    out = capsys.readouterr().out
    assert f"sample 2: {sample}" in out and ends in out


def test_inspect_has_no_schedule(recipe, capsys):
    assert commands.main(["inspect", recipe, "steps=2", "schedule.warmup_steps=50"]) == 0
    assert "sample 1: 29 tokens" in capsys.readouterr().out


def test_a_bar_shows_the_share_of_each_document():
    assert bar_of([4, 2], 8) == "█" * 32 + "▓" * 16 + "·" * 16


def test_the_page_marks_what_is_trained_and_escapes_it(recipe, tmp_path):
    assert commands.main(["inspect", recipe, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<mark>c &lt;b&gt;&lt;|im_end|&gt;</mark>") == 3
    assert "<b>" not in page
    rows = re.findall("^ +[01]  ([█▓]+)·* [12] document", page, re.MULTILINE)
    assert len(rows) == 2 and "<h2>All rows</h2>" in page


def test_pretrain_too(recipe, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc")
    overrides = ["task=pretrain", f"data.path={tmp_path / 'a.txt'}"]
    assert commands.main(["inspect", recipe, *overrides]) == 0
    assert "sample 1: 3 tokens, 2 trained\n<|begin_of_text|>⟦abc<|end_of_text|>⟧\n" in capsys.readouterr().out


def test_texts_with_their_class_and_with_what_is_hidden(recipe, tmp_path, capsys):
    """One token per byte: "no" and its marker; of "ab ab ..." those in brackets are to be told."""
    (tmp_path / "b.jsonl").write_text('{"text": "no", "label": "b"}\n{"text": "yes", "label": "a"}\n')
    overrides = [f"data.path={tmp_path / 'b.jsonl'}", "data.packing=false", "tokenizer.vocabulary_size=258"]
    assert commands.main(["inspect", recipe, "task=classify", *overrides]) == 0
    out = capsys.readouterr().out
    assert "sample 1: 3 tokens, label b\n<|begin_of_text|>no\n" in out
    assert re.search(r"^classes +a 1, b 1$", out, re.MULTILINE)
    assert "trained" not in out
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "ab " * 40}) + "\n")
    assert commands.main(["inspect", recipe, "task=mlm", *overrides, "--html", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    shown = re.search(r"sample 1: 70 tokens, (\d+) trained\n(.*)\n", out)
    pieces = re.findall("⟦(.*?)⟧", shown[2])
    assert 0 < sum(map(len, pieces)) == int(shown[1]) < 35
    assert ("ab " * 40).startswith(re.sub("[⟦⟧]", "", shown[2]).removeprefix("<|begin_of_text|>"))
    assert "last trained token" not in out + (tmp_path / "page.html").read_text()


def test_pairs_are_shown_as_their_two_answers(recipe, tmp_path, capsys):
    """The second pair's answers differ behind the end of a row only."""
    answers = (("c", "de"), ("x" * 60, "x" * 61))
    rows = [{"prompt": "ab", "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.path={tmp_path / 'b.jsonl'}", "data.packing=false"]
    for task in ("dpo", "reward"):
        assert commands.main(["inspect", recipe, f"task={task}", *overrides, "--samples", "1"]) == 0
        out = capsys.readouterr().out
        head = "<|begin_of_text|><|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        for number, which, answer in ((1, "chosen", "c"), (2, "rejected", "de")):
            marked = f"{head}⟦{answer}<|im_end|>⟧\n"
            assert re.search(rf"sample {number}: {which}: \d+ tokens, {len(answer) + 1} trained\n", out)
            assert marked in out
        assert "sample 3" not in out
        assert re.search(r"^  pairs +1$", out, re.MULTILINE)
        assert re.search(r"^  dropped pairs +1 \(50.0%\): nothing is left to compare$", out, re.MULTILINE)


def test_all_texts_of_a_row(recipe, tmp_path, capsys):
    """One token per byte and marker: "why" and its marker are 4."""
    row = {"anchor": "why", "positive": "so", "negative_1": "no", "negative_2": "never"}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "positive": "as"}) + "\n")
    overrides = [f"data.path={tmp_path / 'c.jsonl'}", "data.packing=false", "tokenizer.vocabulary_size=258"]
    more = ["task=embed", "batch.global_batch_size=2", "--samples", "1"]
    assert commands.main(["inspect", recipe, *overrides, *more]) == 0
    out = capsys.readouterr().out
    sizes = re.findall(r"^sample \d: (.*): (\d+) tokens$", out, re.MULTILINE)
    assert sizes == [("anchor", "4"), ("positive", "3"), ("negative 1", "3"), ("negative 2", "6")]
    assert "\n<|begin_of_text|>never\n" in out


def test_data_that_cannot_be_used_have_their_exit_code(recipe, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    assert commands.main(["inspect", recipe]) == 3
    assert "no column 'messages'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "batch.global_batch_size=32",
            "2 training rows of .* fewer than batch.global_batch_size=32",
        ),
        ("data.validation_fraction=0.5", "[01] training rows|no document is held out"),
    ],
)
def test_small_data_are_shown(recipe, tmp_path, capsys, key, reason):
    if "fraction" in key:  # one conversation, with its copies
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": SHORT}) + "\n")
    assert commands.main(["inspect", recipe, key, "--html", str(tmp_path / "look.html")]) == 0
    out = capsys.readouterr().out
    assert "sample 1: 29 tokens, 6 trained" in out and re.search(r"rows  +\d of 70 tokens", out)
    assert re.search(f"training would refuse  +.*chats.jsonl: .*({reason})", out)
    assert "training would refuse" in (tmp_path / "look.html").read_text()


def test_no_model_is_loaded(recipe):
    code = (
        "import sys\nfrom samecurve.cli import commands as cli\n"
        f"cli.main(['inspect', {recipe!r}])\n"
        "sys.exit('a model' if any('modeling_llama' in name for name in sys.modules) else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
