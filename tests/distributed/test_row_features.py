"""What is asked of rows beside their loss: the same on every rank and under every kind of strategy, in their order."""

from __future__ import annotations

import pytest
from harness import long
from test_equal_curves import ENGINES


@pytest.mark.parametrize(
    ("strategy", "world"), [("pipeline", 2), *long(("pipeline", 4), ("ddp", 2), ("fsdp", 2), ("zero3", 2))]
)
def test_features_statistics_and_further_targets(strategy, world, workspace):
    found = workspace.probe("row_features_probe.py", strategy, world, "batch.micro_batch_size=4")
    assert found["engine"] == ENGINES[strategy]
    assert found["rows"] > 10 and found["equal"]
    assert found["features"] < 1e-3  # of sums of some 30 log-likelihoods of about 6 each
    assert all(trained == 0 for _, trained in found["filling"])
    assert found["statistics"][0] == found["statistics"][1]
    for name in ("loss", "eval_loss"):
        ours, expected = found[name]
        assert ours == pytest.approx(expected, rel=1e-5)
