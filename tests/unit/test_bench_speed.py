"""scripts/bench_speed.py: its arithmetic by hand, what it keeps, and that its contestants train the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "steps=8",
    "model.config.hidden_size=48",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "tokenizer.vocabulary_size=512",
    "batch.sequence_length=64",
)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_speed

    monkeypatch.setattr(bench_speed, "pin", lambda: None)  # it would stay for other tests
    return bench_speed


def run(bench, *seconds: float, loss: float = 2.0):
    """120 tokens a step; warm-up took forever."""
    warm_up = [{"loss": 9.0, "tokens": 120, "step_seconds": 1000.0, "mfu": 0.0}] * bench.WARM_UP
    steady = [{"loss": loss, "tokens": 120, "step_seconds": each, "mfu": 0.5} for each in seconds]
    return bench.Run(warm_up + steady, peak_tflops=0.25, peak_gib=loss / 4)


def test_a_ratio_is_of_one_round_and_a_speed_of_the_median_step(bench):
    first = [run(bench, 1.0, 1.0, 9.0), run(bench, 2.0), run(bench, 3.0)]  # 120, 60 and 40 tokens/s
    second = [run(bench, 2.0), run(bench, 2.0), run(bench, 4.0, loss=1.5)]  # 60, 60 and 30
    found = bench.compared({"one": first, "two": second})
    assert found["rows"] == [["one", 60.0, 1.0, 1.0, 1.0, 2.0, 0.5], ["two", 60.0, 0.75, 0.5, 1.0, 1.5, 0.5]]
    assert (found["mfu"], found["peak_tflops"]) == (0.5, 0.25)


def test_a_table_is_measured_without_losing_the_others(bench, tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(bench, "play", lambda match, *more: given.append(more) or {"one": [run(bench, 1.0)]})
    starts = {"rows": [["train.py --help", 0.25, None, 0.2, 0.3, None, None]]}
    monkeypatch.setattr(bench, "starts", lambda *_: starts)
    page = tmp_path / "speed.md"
    options = ["--rounds", "1", "--output", str(page)]
    bench.main([*options, "--only", "start"])
    assert "## Starting" in capsys.readouterr().out
    bench.main([*options, "--only", "own", "--", "steps=8"])
    text = page.read_text()
    assert (
        "| train.py --help | 0.25 | 0.20 to 0.30 |" in text
        and "| one | 120 | 1.00 | 1.00 to 1.00 | 2.0000 | 0.50 |" in text
    )
    assert "The first one's `mfu` is 50% of 0.25 TFLOP/s. 1 rounds with steps=8 on " in text
    assert set(json.loads((tmp_path / "speed" / "results.json").read_text())) == {"start", "own"}
    assert given[0][-1] == ["steps=8"] and "## Starting" not in capsys.readouterr().out


def test_each_machine_has_its_own_tables(bench, tmp_path, monkeypatch):
    """Ratios differ between them."""
    page, results = tmp_path / "speed.md", tmp_path / "speed" / "results.json"
    for device, seconds in (("one", 1.0), ("another", 2.0), ("one", 4.0)):
        monkeypatch.setattr(bench, "processor", lambda device=device: device)
        monkeypatch.setattr(bench, "play", lambda *_, seconds=seconds: {"first": [run(bench, seconds)]})
        bench.main(["--rounds", "1", "--output", str(page), "--only", "own"])
    found = bench.kept(results)["own"]
    assert {device: each.rows[0][1] for device, each in found.items()} == {"one": 30.0, "another": 60.0}
    text = page.read_text()
    assert text.count("## What the framework itself costs") == 1
    assert [text.count(f"### {device}, ") for device in found] == [1, 1]


def test_without_trl_its_table_stays(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "TRL", "")
    bench.main(["--output", str(tmp_path / "speed.md"), "--only", "sft"])
    assert "the table stays as it is" in capsys.readouterr().out and not (tmp_path / "speed.md").exists()


def test_the_page_is_made_of_the_numbers_that_are_kept(bench):
    folder = ROOT / "benchmarks"
    found = bench.kept(folder / "speed" / "results.json")
    assert set(found) == {*bench.MATCHES, "start"}
    assert (folder / "speed.md").read_text() == bench.shown(found)


@pytest.mark.full
def test_contestants_train_the_same(bench, tmp_path):
    """Trainer's learning rate lags a step behind, so its losses are other ones from the second step on."""
    for name in ("pretrain", "own", "ranks"):
        match = bench.MATCHES[name]
        steps = {each: runs[0].steps for each, runs in bench.play(match, 1, tmp_path, TINY).items()}
        assert set(steps) == {contestant.name for contestant in match.contestants}
        expected = [step["loss"] for step in next(iter(steps.values()))]
        for each, found in steps.items():
            tokens = [step["tokens"] for step in found]
            assert tokens == [8 * 64] * 8, each
            num_equal = 1 if "Trainer" in each else 8
            losses = [step["loss"] for step in found[:num_equal]]
            assert losses == pytest.approx(expected[:num_equal], rel=5e-3), each


@pytest.mark.full
@pytest.mark.skipif("SAMECURVE_TRL" not in os.environ, reason="TRL is not there")
def test_trl_trains_the_same_model(bench, tmp_path):
    """On samples that it packs itself; in the beginning all tokens are as likely as any."""
    match = bench.MATCHES["sft"]
    steps = {each: runs[0].steps for each, runs in bench.play(match, 1, tmp_path, TINY).items()}
    assert set(steps) == {contestant.name for contestant in match.contestants}
    for name, found in steps.items():
        assert len(found) == 8 and all(step["tokens"] > 0 for step in found), name
        assert found[0]["loss"] == pytest.approx(steps["samecurve"][0]["loss"], rel=0.05), name
