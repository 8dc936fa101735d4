"""Errors in the gradient norm of a run over ranks: the norm shows each of them, the first loss shows none.

Norm weights get gradients as large as those of other weights, because the model starts with large weights. At the usual
initializer_range of 0.02, two of the errors change the first norm by less than the tolerance of the equality tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import LLAMA, Workspace, launch_command
from planted_norm_probe import ERRORS

SEEN = 1e-2  # relative change of the norm that an error makes, at least
TIED = "a tied weight counts on both stages"
PLANTED = {
    "tp": (
        "gradients stay where PyTorch left them",
        "each rank's copy counts",
        "a norm's gradient is of the rank's tokens",
    ),
    "fsdp_tp": ("each rank's copy counts",),
    "pipeline_1f1b": (TIED,),
}


def probe(workspace: Workspace, path: Path | None, world: int, tied: bool, *errors: str) -> dict:
    script = Path(__file__).with_name("planted_norm_probe.py")
    config = json.dumps({**LLAMA, "tie_word_embeddings": tied, "initializer_range": 0.3})
    arguments = [str(workspace.recipe), "data.packing=true", f"model.config={config}"]
    arguments += [f"batch.micro_batch_size={8 if path is None else 8 // world}"]
    command = launch_command("fork", path, world, workspace.folder, str(script)) + arguments
    command += ["--strategy", str(path)] if path else []
    run = workspace.execute(command, workspace.folder, CASES=",".join(("none", *errors)))
    assert run.returncode == 0, run.output
    return json.loads(run.output.split("FOUND ", 1)[1].splitlines()[0])


def test_each_error_is_planted_somewhere():
    assert {"none", *(error for errors in PLANTED.values() for error in errors)} == ERRORS.keys()


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("tp", 2), ("fsdp_tp", 4), ("pipeline_1f1b", 2)])
def test_planted_errors_change_the_norm(strategy, world, workspace):
    tied, errors = TIED in PLANTED[strategy], PLANTED[strategy]
    path = workspace.sequence_parallel("tp") if strategy == "tp" else workspace.strategy(strategy)
    expected = probe(workspace, None, 1, tied)["none"]
    found = probe(workspace, path, world, tied, *errors)
    assert found.keys() == {"none", *errors}
    right = found.pop("none")
    assert right["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert right["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    for error, wrong in found.items():
        assert wrong["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-5), error
        off = [abs(norm / reference - 1) for norm, reference in zip(wrong["norm"], expected["norm"], strict=True)]
        assert min(off) > SEEN, (error, off)
