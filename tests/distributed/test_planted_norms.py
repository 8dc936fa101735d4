"""Errors in the gradient norm of a run over ranks: the norm shows each of them, the first loss shows none.

Norm weights get gradients as large as those of other weights, because the model starts with large weights. At the usual
initializer_range of 0.02, two of the errors change the first norm by less than the tolerance of the equality tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import LLAMA, Workspace
from planted_norm_probe import ERRORS
from test_expert_parallel import COMMON, CONFIGS

SEEN = 1e-2  # relative change of the norm that an error makes, at least
TIED = "a tied weight counts on both stages"
PLANTED = {
    ("tp", 2): (
        "gradients stay where PyTorch left them",
        "each rank's copy counts",
        "a norm's gradient is of the rank's tokens",
    ),
    ("fsdp_tp", 4): ("each rank's copy counts",),
    ("pipeline_1f1b", 2): (TIED, "the norm is of the rank's stages"),
    ("pipeline_zbv", 2): ("the norm is of the rank's stages",),
    ("fsdp_cp", 2): (
        "the norm is of a part's shards",
        "gradients are a mean over the parts of a row",
        "keys miss the gradients of other parts' queries",
    ),
    ("fsdp_ep", 2): ("experts' gradients are not divided", "experts' gradients are divided twice"),
    ("fsdp_ep", 4): ("experts' gradients are not divided", "experts' gradients are divided twice"),
    ("fsdp_ep_tp", 4): ("each rank's copy of an expert counts",),
}


def model_of(strategy: str) -> dict:
    if "ep" in strategy.split("_"):
        model = {**COMMON, **CONFIGS["mixtral"], "model_type": "mixtral", "router_aux_loss_coef": 0.0}
    else:
        model = {**LLAMA, "tie_word_embeddings": TIED in PLANTED.get((strategy, 2), ())}
    return model | {"initializer_range": 0.3}


def probe(workspace: Workspace, path: Path | None, world: int, micro_batch: int, model: dict, *errors: str) -> dict:
    overrides = "data.packing=true", f"model.config={json.dumps(model)}", f"batch.micro_batch_size={micro_batch}"
    return workspace.probe("planted_norm_probe.py", path, world, *overrides, CASES=",".join(("none", *errors)))


def test_each_error_is_planted_somewhere():
    assert {"none", *(error for errors in PLANTED.values() for error in errors)} == ERRORS.keys()


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), PLANTED)
def test_planted_errors_change_the_norm(strategy, world, workspace):
    errors, model = PLANTED[strategy, world], model_of(strategy)
    path = workspace.sequence_parallel("tp") if strategy == "tp" else workspace.strategy(strategy)
    expected = probe(workspace, None, 1, 8, model)["none"]
    # several micro-batches of a pipeline
    found = probe(workspace, path, world, 2 if strategy == "pipeline_zbv" else 8 // world, model, *errors)
    assert found.keys() == {"none", *errors}
    right = found.pop("none")
    assert right["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert right["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    for error, wrong in found.items():
        assert wrong["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-5), error
        off = [abs(norm / reference - 1) for norm, reference in zip(wrong["norm"], expected["norm"], strict=True)]
        assert min(off) > SEEN, (error, off)
