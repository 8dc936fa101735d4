"""At the end of a run its export is loaded in a new process by transformers alone (`export.verify`)."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from harness import long
from test_equal_curves import ENGINES, libaio_is_installed

SHORT = ("steps=3", "schedule.warmup_steps=0", "evaluate.every_steps=0", "checkpoint.every_steps=0", "export.verify=1M")
LINE = re.compile(r"^export reloaded by transformers (\S+): (\w+) differ by at most (\S+) \(allowed: (\S+)\)$", re.M)
EVERY_DAY = ["zero3"]


def verified(run) -> tuple[str, float, float]:
    """(what was compared, largest difference, allowed difference) of a run's last lines."""
    assert run.returncode == 0, run.output
    (version, kind, difference, limit) = LINE.search(run.output).groups()
    assert version == metadata.version("transformers")
    assert (run.directory / "model").is_dir()
    assert not (run.directory / "rejected_model").exists()
    return kind, float(difference), float(limit)


@pytest.mark.parametrize("strategy", [*EVERY_DAY, *long(*(name for name in ENGINES if name not in EVERY_DAY))])
def test_the_export_of_every_strategy_is_the_trained_model(strategy, workspace):
    if strategy == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    run = workspace.run(strategy, {"single": 1, "hsdp": 4}.get(strategy, 2), "batch.micro_batch_size=1", *SHORT)
    kind, difference, limit = verified(run)
    assert kind == "logits" and difference < 1e-5 < limit * 1e2
