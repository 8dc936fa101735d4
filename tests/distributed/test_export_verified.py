"""At the end of a run its export is loaded in a new process by transformers alone (`export.verify`)."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from harness import long
from test_equal_curves import ENGINES, libaio_is_installed
from test_recipes import RECIPES, file, started

__all__ = ["file"]  # a fixture

SHORT = ("steps=3", "schedule.warmup_steps=0", "evaluate.every_steps=0", "checkpoint.every_steps=0", "export.verify=1M")
LINE = re.compile(r"^export reloaded by transformers (\S+): (\w+) differ by at most (\S+) \(allowed: (\S+)\)$", re.M)
EVERY_DAY = ["zero3"]


def verified(run) -> tuple[str, float, float]:
    """(what was compared, largest difference, allowed difference) of a run's last lines."""
    assert run.returncode == 0, run.output
    found = LINE.search(run.output)
    assert found, run.output
    version, kind, difference, limit = found.groups()
    assert version == metadata.version("transformers")
    assert (run.directory / "model").is_dir()
    assert not (run.directory / "rejected_model").exists()
    return kind, float(difference), float(limit)


@pytest.mark.parametrize("strategy", [*EVERY_DAY, *long(*(name for name in ENGINES if name not in EVERY_DAY))])
def test_the_export_of_every_strategy_is_the_trained_model(strategy, workspace):
    if strategy == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    run = workspace.run(
        strategy,
        {"single": 1, "hsdp": 4, "zero3_hpz": 4, "pp_fsdp_tp": 8, "fsdp_tp_cp": 4}.get(strategy, 2),
        "batch.micro_batch_size=1",
        *SHORT,
    )
    kind, difference, limit = verified(run)
    assert kind == "logits" and difference < 1e-5 < limit * 1e2


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3", "pipeline"])
def test_what_bf16_rounds_is_allowed(strategy, workspace):
    """The new process computes in fp32; weights and batch differ from the trained model's by rounding alone."""
    changes = ("precision=bf16", "batch.micro_batch_size=1")
    kind, difference, limit = verified(workspace.run(strategy, 1 if strategy == "single" else 2, *SHORT, *changes))
    assert kind == "logits" and 1e-4 < difference < limit / 2 < 0.5


@pytest.mark.full
@pytest.mark.parametrize("strategy", [None, "zero3"])
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"qlora"}))
def test_the_export_of_every_recipe_is_the_trained_model(recipe, strategy, workspace, file):
    kind, difference, limit = verified(started(workspace, file, recipe, strategy, "1B"))
    assert kind == ("states" if recipe == "embed" else "logits")
    assert difference < 1e-5


@pytest.mark.parametrize("strategy", long("pipeline_1f1b", "fsdp_cp", "fsdp_ulysses"))
def test_the_export_of_a_reward_model_is_the_trained_one(strategy, workspace, file):
    kind, difference, _ = verified(started(workspace, file, "reward", strategy, "1B"))
    assert kind == "logits" and difference < 1e-5


@pytest.mark.full
def test_compiled_layers_are_not_compiled_again(workspace):
    run = workspace.run(None, 1, "compile=regional", *SHORT, launcher="python")
    assert verified(run)[1] < 1e-5


@pytest.mark.full
def test_an_adapter_on_4_bit_weights_is_not_verified(workspace, file):
    pytest.importorskip("bitsandbytes")
    run = started(workspace, file, "qlora", "ddp", "1B")
    assert LINE.search(run.output) is None and (run.directory / "model").is_dir()
