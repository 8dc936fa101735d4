"""continue_pretrain on a mixture and on a stream: the same curve under every strategy, and on from another's."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from harness import Run, largest_relative_difference, long, relative_l2
from transformers import AutoModelForCausalLM

from samecurve.cli import commands
from samecurve.config import loader
from samecurve.losses.cross_entropy import IGNORE_INDEX, token_loss_sum
from samecurve.tasks import registry

STEPS, SAVED = 10, 5
WEIGHTS = {"a": 0.55, "b": 0.3, "c": 0.15}
SIZES = (("text", 200), ("body", 40), ("text", 15))  # columns, documents


@pytest.fixture(scope="module")
def overrides(workspace) -> tuple[str, ...]:
    """Sources of different size, text and column; one is read about three times and one less than once."""
    draw = random.Random(7)
    sources = []
    for (name, weight), (column, count) in zip(WEIGHTS.items(), SIZES, strict=True):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(30)]
        texts = [" ".join(draw.choices(words, k=draw.randint(3, 50))) for _ in range(count)]
        file = workspace.folder / f"mixture_{name}.jsonl"
        file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
        sources.append(f"{{path: {file}, weight: {weight}, text_column: {column}}}")
    return (
        "task=continue_pretrain",
        f"model={{path: {workspace.base}}}",
        f"tokenizer={{path: {workspace.base}}}",
        "data.path=null",
        f"data.mixture=[{', '.join(sources)}]",
        "data.packing=true",
        f"steps={STEPS}",
        "evaluate.every_steps=10",
        f"checkpoint.every_steps={SAVED}",
        "batch.micro_batch_size=2",
    )


@pytest.fixture(scope="module")
def single(workspace, overrides) -> Run:
    return finished(workspace.run(None, 1, *overrides, launcher="python"))


def finished(run: Run) -> Run:
    assert run.returncode == 0, run.output
    return run


def agree(run: Run, single: Run, evaluated=("", "_source_0", "_source_1", "_source_2")) -> None:
    assert run.column("samples") == single.column("samples") and run.column("tokens") == single.column("tokens")
    assert largest_relative_difference(run.column("loss"), single.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), single.column("grad_norm")) < 1e-4
    assert relative_l2(run.weights, single.weights) < 1e-4
    for name in evaluated:
        key = f"eval_loss{name}"
        assert run.metrics[-1][key] == pytest.approx(single.metrics[-1][key], rel=1e-5)


@pytest.mark.parametrize("strategy", ["zero3", *long("ddp", "fsdp", "zero2", "pipeline", "tp", "fsdp_cp")])
def test_the_same_curve(strategy, workspace, overrides, single):
    run = finished(workspace.run(strategy, 2, *overrides))
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == 2
    agree(run, single)


def test_a_run_goes_on_under_another_strategy(workspace, overrides, single):
    run = finished(workspace.resume(single, SAVED, "ddp", 2, *overrides))
    assert run.facts["resumed_from"] and run.facts["strategy"] == "ddp"
    agree(run, single)


def test_other_weights_do_not_go_on(workspace, overrides, single):
    changed = [text.replace("weight: 0.3", "weight: 0.4") for text in overrides]
    run = workspace.resume(single, SAVED, None, 1, *changed)
    assert run.returncode != 0 and "CheckpointError (exit code 4)" in run.output
    assert "shares: [0.55, 0.3, 0.15] -> [0.5, 0.363" in run.output


def test_what_the_run_says_of_its_sources(workspace, overrides, single):
    """The weights from the rows of all steps; the first loss and the last evaluation from transformers alone."""
    data = single.facts["data"]
    assert [data[f"source {index}"]["weight"] for index in range(3)] == list(WEIGHTS.values())
    more = f"data.cache_dir={workspace.folder / 'cache'}"
    task = registry.load_task(loader.load_recipe(str(workspace.recipe), [*overrides, more]))
    read = task.train.at_positions(np.arange(8 * STEPS), seed=3)
    counts = np.histogram(read, bins=np.cumsum([0, *map(len, task.train.parts)]))[0]
    assert np.abs(counts - 8 * STEPS * np.array(list(WEIGHTS.values()))).max() <= 1
    assert single.column("loss")[0] == pytest.approx(mean_loss(workspace.base, task.train, read[:8]), rel=1e-6)
    for index, rows in enumerate(task.validation.parts):
        expected = mean_loss(single.directory / "model", rows, np.arange(len(rows)))
        assert single.metrics[-1][f"eval_loss_source_{index}"] == pytest.approx(expected, rel=1e-6)


def mean_loss(folder, rows, indices) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = rows[indices]
    inputs = {name: torch.from_numpy(array) for name, array in found.inputs.items()}
    with torch.no_grad():
        # with a cache transformers 5 does not tell packed documents apart
        logits = model(**inputs, use_cache=False).logits
        total = token_loss_sum(logits, torch.from_numpy(found.labels))
    return total.item() / int((found.labels != IGNORE_INDEX).sum())


@pytest.fixture(scope="module")
def streaming(workspace, overrides) -> tuple[str, ...]:
    """Blocks of some 15 rows, so that 80 rows end several."""
    data = (
        f"data.path={workspace.folder / 'documents.jsonl'}",
        "data.streaming=true",
        "data.shuffle_buffer_mib=0.0012",
    )
    kept = (text for text in overrides if not text.startswith(("data.mixture", "data.path")))
    return (*kept, *data, "data.validation_fraction=0.3")


@pytest.fixture(scope="module")
def streamed(workspace, streaming) -> Run:
    return finished(workspace.run(None, 1, *streaming, launcher="python"))


@pytest.mark.parametrize("strategy", ["zero3", *long("ddp", "fsdp", "pipeline")])
def test_a_stream_goes_on_under_another_strategy(strategy, workspace, streaming, streamed):
    anchor = json.loads((streamed.checkpoint(SAVED) / "state.json").read_text())["anchor"]
    assert anchor["block"] > 0
    run = finished(workspace.resume(streamed, SAVED, strategy, 2, *streaming))
    assert run.facts["resumed_from"] and run.facts["strategy"] == strategy and run.facts["world_size"] == 2
    agree(run, streamed, evaluated=("",))


@pytest.mark.full
def test_a_broken_line_far_into_a_stream_ends_all_ranks(workspace, streaming):
    file = workspace.folder / "broken.jsonl"
    lines = (workspace.folder / "documents.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:200], "{\n", *lines[200:]]))
    run = workspace.run("ddp", 2, *streaming, f"data.path={file}", "steps=200")
    assert run.status["state"] == "failed" and run.status["exit_code"] == 3
    assert "broken.jsonl: byte" in run.output and "invalid JSON" in run.output


@pytest.mark.parametrize("name", ["single", "streamed"])
def test_evaluate_finds_what_the_run_wrote(name, workspace, request, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMECURVE_CACHE", str(workspace.folder / "cache"))
    run = request.getfixturevalue(name)
    assert commands.main(["evaluate", str(run.directory), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["metrics"]
    wrote = {key: value for key, value in run.metrics[-1].items() if key.startswith("eval_")}
    assert found == pytest.approx(wrote, rel=1e-6) and len(wrote) == (7 if name == "single" else 4)
