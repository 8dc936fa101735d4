import contextlib
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from samecurve.config.schema import Batch, Recipe, Schedule
from samecurve.interfaces.engine import EngineDescription
from samecurve.metrics.console import Progress, duration, header_lines, numbers_of
from samecurve.models.weights import ModelDescription
from samecurve.run.metadata import RunFacts
from samecurve.storage.terminal import TextConsole
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Plan, Strategy

RECIPE = Recipe(
    output_dir="runs/quickstart",
    steps=120,
    precision="bf16",
    model={"config": {"model_type": "llama"}},
    data={"path": "x"},
    batch={"global_batch_size": 64, "micro_batch_size": 4, "sequence_length": 256},
    optimizer={"learning_rate": 1e-3},
    schedule={"warmup_steps": 0},
)
STRATEGY = Strategy(name="zero3", path=Path("configs/zero3.yaml"), launcher="torchrun")
ENGINE = EngineDescription(
    engine="DeepSpeedEngine",
    optimizer="AdamW",
    device="cpu",
    world_size=16,
    dims=ParallelDims(pp=2, dp_shard=8),
    num_parameters=1234567,
    num_trained_parameters=1234567,
    num_parameters_per_rank=154321,
    precision="bf16",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_clipping=1.0,
    weight_dtype="float32",
    reduce_dtype="float32",
    sharded=False,
)
FACTS = RunFacts(
    plan=Plan(RECIPE, STRATEGY, "recipes/quickstart.yaml", ()),
    engine=ENGINE,
    model=ModelDescription(model_type="llama", attention="varlen"),
    data={"train": {"rows": 4096, "documents": 800}, "held_out": {"rows": 64}, "vocabulary_size": 512},
    device="cpu",
)


def facts(recipe: dict | None = None, engine: dict | None = None, model: dict | None = None, **changes) -> RunFacts:
    """FACTS with other values."""
    plan = replace(FACTS.plan, recipe=RECIPE.model_copy(update=recipe or {}))
    parts = {"engine": replace(ENGINE, **engine or {}), "model": replace(FACTS.model, **model or {})}
    return replace(FACTS, plan=plan, **parts, **changes)


def record(step, **changes):
    values = {
        "step": step,
        "loss": 6.25,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "input_tokens": 24691,
        "step_seconds": 2.0,
        "tokens_per_second": 12345.6,
        "mfu": 0.25,
        "data_wait_fraction": 0.01,
        "peak_memory_gib": 1.25,
    }
    return {**values, **changes}


def shown(total, every, terminal=False, enabled=True, width=200):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=width, highlight=False)
    with Progress(total, every, enabled, console, started=0.0) as progress:
        for step in range(1, total + 1):
            progress.step(record(step), smoothed_loss=6.5)
        progress.evaluation(total, {"eval_loss": 3.5, "eval_tokens": 12000})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("changes", "label", "texts"),
    [
        ({"model": {"dropout": {"attn_pdrop": 0.1}}}, "dropout", ["attn_pdrop 0.1"]),
        ({"model": {"unread_tensors": "mtp (12 tensors)"}}, "not read", ["of model.path: mtp (12 tensors)"]),
        ({"model": {"unread_keys": ["a", "b"]}}, "not read", ["of model.config: a, b"]),
        ({"model": {"unproven": ["packed rows", "kernels"]}}, "unproven", ["packed rows", "kernels"]),
        (
            *({"recipe": {"schedule": Schedule(warmup_steps=6)}}, "recipe"),
            ["recipes/quickstart.yaml (pretrain, 120 steps, 6 of them warm-up)"],
        ),
        ({"data": {"sequences_per_row": 2}}, "tokens", ["32,768 per step = 64 rows x 2 texts x 256"]),
        ({"engine": {"dims": ParallelDims(), "sharded": True}}, "mesh", []),  # one dimension needs no line
        ({"engine": {"dims": ParallelDims(dp_shard=2), "sharded": True}}, "mesh", []),
    ],
)
def test_lines_of_the_header(changes, label, texts):
    assert [text for name, text in header_lines(facts(**changes)) if name == label] == texts


def test_header_says_what_runs():
    assert header_lines(FACTS) == [
        ("recipe", "recipes/quickstart.yaml (pretrain, 120 steps)"),
        ("epochs", "1.875 passes over 4,096 rows, 64 steps each"),
        ("strategy", "zero3 (configs/zero3.yaml)"),
        ("engine", "DeepSpeedEngine on cpu"),
        ("world", "16 processes by torchrun, 8 data-parallel, 2 pipeline stages"),
        ("mesh", "2 stages x 8 data-parallel, the last over neighbouring ranks"),
        ("parameters", "1,234,567 in all, 154,321 on this rank"),
        ("precision", "bf16: weights float32, reduction float32"),
        ("batch", "64 rows = 4 micro x 2 accumulation x 8 data-parallel"),
        ("tokens", "16,384 per step = 64 rows x 256"),
        ("attention", "varlen"),
        ("train", "rows 4,096, documents 800"),
        ("held out", "rows 64"),
        ("data", "vocabulary size 512"),
        ("output", "runs/quickstart"),
    ]


@pytest.mark.parametrize(
    ("mesh", "sharded", "text"),
    [
        ({"dp_replicate": 2, "dp_shard": 4}, True, "2 replicas x 4 shards"),
        ({"pp": 2, "dp_shard": 3, "tp": 2}, True, "2 stages x 3 shards x 2 tensor-parallel"),
        ({"dp_shard": 2, "cp": 4, "tp": 2}, True, "2 shards x 4 context-parallel x 2 tensor-parallel"),
        ({"pp": 2, "dp_replicate": 2}, False, "2 stages x 2 replicas"),
        ({"pp": 2, "dp_shard": 2}, False, "2 stages x 2 data-parallel"),  # DeepSpeed's pipeline
    ],
)
def test_header_says_how_ranks_are_arranged(mesh, sharded, text):
    lines = header_lines(facts(engine={"dims": ParallelDims(**mesh), "sharded": sharded}))
    place = lines.index(("mesh", f"{text}, the last over neighbouring ranks"))
    assert lines[place - 1][0] == "world"


def test_header_warns_of_a_slow_precision():
    lines = header_lines(facts(precision_warning="bf16 is slow on this CPU"))
    where = lines.index(("warning", "bf16 is slow on this CPU"))
    assert lines[where - 1][0] == "precision"


@pytest.mark.parametrize(
    ("rows", "micro", "ranks", "stages", "expected"),
    [
        (32, 7, 1, 1, ["32 rows = 4 x 7 + 4"]),
        (32, 4, 7, 1, ["32 rows = 4 + 1 on 4 of 7 ranks; 4 + 0 on 3 of 7 ranks",
                       "the uneven division leaves 8.6% of the devices' time unused"]),  # 1 - 32 / (7 * 5)
        (9, 4, 2, 2, ["9 rows = 4 + 1 on 1 of 2 ranks; 4 + 0 on 1 of 2 ranks",
                      "the uneven division leaves 43.8% of the devices' time unused"]),  # 1 - 9 / (2 * 2 * 4)
        (8, 16, 2, 1, ["8 rows = 4 micro x 1 accumulation x 2 data-parallel"]),
    ],
)  # fmt: skip
def test_header_says_how_the_rows_fall(rows, micro, ranks, stages, expected):
    batch = Batch(global_batch_size=rows, micro_batch_size=micro, sequence_length=256)
    lines = header_lines(facts({"batch": batch}, {"dims": ParallelDims(pp=stages, dp_shard=ranks)}))
    first = [label for label, _ in lines].index("batch")
    last = [label for label, _ in lines].index("tokens")
    assert [text for _, text in lines[first:last]] == expected


def test_plain_lines_first_last_and_every_third():
    lines = shown(total=10, every=3).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/10", "3/10", "6/10", "9/10", "10/10"]
    assert lines[0] == (
        "step  1/10  loss 6.2500  smoothed 6.5000  lr 1.00e-03  norm 1.500  tokens/s 12,346  mfu 25.0%  "
        "data wait 1%  memory 1.25 GiB"
    )
    assert lines[1].startswith("first step done ")
    assert lines[2].endswith("left 14 s")
    assert lines[-1] == "evaluation after step 10: loss 3.5000  tokens 12,000"


def test_unknown_numbers_are_left_out():
    stream = io.StringIO()
    with Progress(1, console=Console(file=stream, width=200), started=0.0) as progress:
        progress.step(record(1, loss=None, mfu=None), smoothed_loss=None)
    first = stream.getvalue().splitlines()[0]
    assert "loss" not in first and "mfu" not in first and "norm 1.500" in first


def test_tokens_read_and_tokens_trained():
    numbers = numbers_of(record(1, input_tokens=98765), smoothed_loss=None)
    assert "tokens/s 49,382 (12,346 trained)" in numbers
    assert "tokens/s 12,346" in numbers_of(record(1, input_tokens=25000), smoothed_loss=None)


def test_advice_once_the_run_is_warm():
    stream = io.StringIO()
    with Progress(9, console=Console(file=stream, width=200), started=0.0) as progress:
        progress.advice = lambda: "the machine is busy"
        for step in range(1, 10):
            progress.step(record(step), smoothed_loss=6.5)
    lines = stream.getvalue().splitlines()
    assert lines.count("the machine is busy") == 1 and lines[2] == "the machine is busy"


@pytest.mark.parametrize("width", [80, 200])
def test_bar_on_a_terminal(width):
    text = shown(total=4, every=1, terminal=True, width=width)
    assert "step 4/4" in text and "━" in text and "left 0 s" in text
    for number in ("loss 6.2500", "smoothed 6.5000", "lr 1.00e-03", "norm 1.500", "tokens/s 12,346", "memory 1.25 GiB"):
        assert text.count(number) >= 4
    assert "\nstep 2/4  loss" not in text


def test_other_ranks_say_nothing():
    assert shown(total=4, every=1, enabled=False) == ""
    assert shown(total=4, every=1, terminal=True, enabled=False) == ""


def test_brackets_are_not_markup():
    stream = io.StringIO()
    Progress(1, console=Console(file=stream, width=200)).log("[red]x[/red]")
    assert stream.getvalue() == "[red]x[/red]\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (200, "3:20 min"), (7500, "2:05 h")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_the_run_goes_on_when_the_pipe_is_broken():
    """As of `train.py | tee log` when Ctrl-C ends tee too: rich would end the process, without a checkpoint."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    with Progress(9, 1, console=TextConsole(file=stream)) as progress:
        for step in (1, 2):
            progress.step(record(step), 3.0)
        progress.evaluation(2, {"eval_loss": 1.0})
    with contextlib.suppress(OSError):
        stream.close()


def test_the_run_goes_on_when_the_terminal_is_gone():
    import pty

    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w", buffering=1)
    with Progress(9, console=TextConsole(file=stream, force_terminal=True)) as progress:
        progress.step(record(1), 3.0)
        os.close(master)
        progress.step(record(2), 3.0)
        progress.log("a line")


def test_a_step_costs_the_same_after_many():
    """What Progress keeps does not grow; the time left, the median and the peak are still those of the session."""
    predicted = {key: 2.0 for key in ("step_seconds", "peak_memory_gib")}
    predicted |= {f"{key}_interval": [1.0, 3.0] for key in ("step_seconds", "peak_memory_gib")} | {"basis": ""}
    kept = []
    for total in (10_000, 50_000):
        stream = io.StringIO()
        progress = Progress(total, total, console=Console(file=stream, width=200), started=0.0)
        progress.header(facts(predicted=predicted))
        for step in range(1, total + 1):
            # 900 s in the first step; then 1, 2, 3, 1, 2, 3, ...
            peak = 7.25 if step == 17 else 1.0
            progress.step(record(step, step_seconds=step % 3 + 1.0 if step > 1 else 900.0, peak_memory_gib=peak), 6.5)
            if step == total // 2:
                assert progress._rest() == f"left {duration(2.0 * total / 2)}"
        assert "step: 2 s; predicted" in stream.getvalue() and "rank 0: 7.25 GiB; predicted" in stream.getvalue()
        kept.append(sum(len(value) for value in vars(progress).values() if isinstance(value, (list, dict))))
    assert max(kept) < 5000
