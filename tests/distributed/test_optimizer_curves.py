"""Each optimizer trains the same curve under every strategy that takes it, and goes on from another strategy's state.

All optimizers of a strategy share one start, see optimizer_probe.py. That their updates are right is shown beside other
implementations in tests/unit/test_optimizers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import launch_command, long
from optimizer_probe import SAVED, STEPS
from test_equal_curves import ENGINES
from test_resume import whole

from samecurve.optim import TRAITS

RATES = {"adamw": 3e-3, "lion": 5e-4, "sgd": 0.3, "adafactor": 3e-2, "muon": 3e-3, "adamw_8bit": 3e-3}
ELEMENTWISE = ("adamw", "lion", "sgd")
TAKEN = dict.fromkeys(["zero1", "zero2", "zero3", "pipeline"], ELEMENTWISE) | dict.fromkeys(
    ["ddp", "fsdp", "hsdp"], (*ELEMENTWISE, "adafactor", "muon")
)
TAKEN["ddp"] = (*TAKEN["ddp"], "adamw_8bit")
LOSS, NORM, STATE = 1e-5, 1e-4, 1e-4


def start(workspace, strategy: str | None, world: int, names, origin: Path | None = None) -> dict[str, dict]:
    """Results by optimizer."""
    folder = workspace.folder / f"optimizers_{len(list(workspace.folder.iterdir()))}"
    folder.mkdir()
    optimizers = {name: [f"optimizer.name={name}", f"optimizer.learning_rate={RATES[name]}"] for name in names}
    wanted = {"optimizers": optimizers, "folder": str(folder), "results": str(folder / "results.jsonl")}
    (folder / "wanted.json").write_text(json.dumps(wanted | {"origin": origin and str(origin)}))
    path = workspace.strategy(strategy) if strategy else None
    script = str(Path(__file__).with_name("optimizer_probe.py"))
    command = launch_command("fork", path, world, folder, script)
    command += [str(folder / "wanted.json"), str(workspace.recipe), f"steps={STEPS}", "schedule.warmup_steps=2"]
    command += ["batch.micro_batch_size=2", *(["--strategy", str(path)] if path else [])]
    run = workspace.execute(command, folder)
    assert run.returncode == 0, run.output
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["optimizer"] for line in lines] == list(names)
    return {line["optimizer"]: line | {"folder": folder / line["optimizer"]} for line in lines}


@pytest.fixture(scope="module")
def single(workspace) -> dict[str, dict]:
    found = start(workspace, None, 1, list(RATES))
    for name, line in found.items():
        losses = [loss for loss, _ in line["results"]]
        assert len(losses) == STEPS and losses[-1] < losses[0] - 0.02, (name, losses)
    return found


def test_all_optimizers_are_covered():
    assert RATES.keys() == TRAITS.keys()


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("ddp", 2), ("fsdp", 2), ("zero1", 2), ("zero3", 2), *long(("hsdp", 4), ("zero2", 2), ("pipeline", 2))],
)
def test_the_same_curve_and_state_under_every_strategy(strategy, world, single, workspace):
    names = TAKEN[strategy]
    origin = single["adamw"]["folder"].parent
    for name, line in start(workspace, strategy, world, names, origin).items():
        assert line["engine"] == ENGINES[strategy]
        expected = single[name]["results"]
        assert_close(line["results"], expected, name)
        assert line["unequal"] == []
        assert_close(line["after"], expected[SAVED:], name)
        assert_same_state(line["folder"], single[name]["folder"])


def assert_close(found, expected, name: str) -> None:
    assert len(found) == len(expected) > 0
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=LOSS), name
        assert norm == pytest.approx(expected_norm, rel=NORM), name


def assert_same_state(found: Path, expected: Path) -> None:
    """What one strategy saved is what another one did, up to rounding."""
    ours, theirs = (whole(folder / "checkpoints" / f"step_{SAVED:08d}") for folder in (found, expected))
    assert ours.keys() == theirs.keys() and len(ours) > 70, ours.keys() ^ theirs.keys()
    for kind in {key.partition("/")[0] for key in ours}:
        pairs = [(ours[key].double(), theirs[key].double()) for key in ours if key.startswith(f"{kind}/")]
        difference = sum((a - b).square().sum() for a, b in pairs)
        assert (difference / sum(b.square().sum() for _, b in pairs)).sqrt() < STATE, kind
