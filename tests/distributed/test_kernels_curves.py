"""Liger's kernels train the curve of PyTorch's, also where weights are gathered for a moment or lie in stages.

By Triton's interpreter, in fp32: see tests/unit/interpreted.py.
"""

from __future__ import annotations

import importlib.util

import pytest
from harness import LLAMA
from test_step_options import PLAIN, assert_equal, probe

MISSING = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SMALL = {**LLAMA, "num_hidden_layers": 2}
# one program of a kernel after the other, so as few tokens as there can be
FEW = "batch.sequence_length=8", "batch.global_batch_size=4", "data.validation_fraction=0.02"
OVERRIDES = ("model.config.num_hidden_layers=2", *FEW)
SCRIPT = "kernels_curves_probe.py"
FULL = {"memory": {"activation_checkpointing": "full"}}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3", "pipeline"])
def test_the_same_curve(strategy, workspace):
    implementation = "full" if strategy == "pipeline" else "liger"
    liger = {"model": {"config": SMALL, "kernels": "liger"}, "loss": {"implementation": implementation}}
    cases = {PLAIN: {}, "liger": liger, "recomputed": {**liger, **FULL}}
    found = probe(workspace, strategy, cases, *OVERRIDES, script=SCRIPT, launcher="torchrun")
    assert found[PLAIN]["kernels"] == []
    for name in ("liger", "recomputed"):
        assert found[name]["kernels"] == ["5 LigerRMSNorm", "2 LigerSwiGLUMLP", "apply_rotary_pos_emb"]
        assert found[name]["loss_implementation"] == implementation
    assert_equal(found, 1e-5)
