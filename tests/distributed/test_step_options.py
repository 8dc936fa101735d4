"""What is recomputed, offloaded or compiled trains the same curve as what is not, under every kind of strategy."""

from __future__ import annotations

import json
import shutil

import pytest
from harness import long
from test_equal_curves import ENGINES

PLAIN = "none"
KINDS = {
    "full": {"activation_checkpointing": "full"},
    "every_n_layers": {"activation_checkpointing": "every_n_layers", "every_n_layers": 3},
    "matmul": {"activation_checkpointing": "selective"},
    "attention": {"activation_checkpointing": "selective", "selective_save": "attention"},
    "offload": {"activation_checkpointing": "offload"},
}
CHECKPOINTED = {PLAIN: {}, **{name: {"memory": memory} for name, memory in KINDS.items()}}
REGIONAL = ["regional", "regional matmul", "regional offload"]
WITH_CHECKPOINTS = [f"regional {name}" for name in KINDS]
IN_STAGES = ["regional", *(f"regional {name}" for name in ("full", "every_n_layers", "matmul"))]
COMPILED = {
    PLAIN: {},
    "regional": {"compile": "regional"},
    **{f"regional {name}": {"compile": "regional", "memory": memory} for name, memory in KINDS.items()},
    "full": {"compile": "full"},
    "full full": {"compile": "full", "memory": KINDS["full"]},
    "full matmul": {"compile": "full", "memory": KINDS["matmul"]},
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")


def probe(
    workspace, strategy: str, cases: dict, *overrides: str, script: str = "options_probe.py", launcher: str = "fork"
) -> dict:
    world, path = (1, None) if strategy == "single" else (2, strategy)
    overrides = ("batch.micro_batch_size=2", *overrides)
    found = workspace.probe(script, path, world, *overrides, launcher=launcher, CASES=json.dumps(cases))
    assert found.keys() == cases.keys()
    assert {case["engine"] for case in found.values()} == {ENGINES[strategy]}
    return found


def assert_equal(found: dict, tolerance: float) -> None:
    expected = found.pop(PLAIN)
    assert expected["loss"][0] > expected["loss"][-1]
    for name, case in found.items():
        for key in ("loss", "norm", "eval_loss"):
            assert case[key] == pytest.approx(expected[key], rel=tolerance), (name, key)


@pytest.mark.parametrize(
    "strategy", ["fsdp", *long("single", "ddp", "zero1", "zero2", "zero3", "pipeline", "tp", "fsdp_tp")]
)
def test_activation_checkpointing(strategy, workspace):
    found = probe(workspace, strategy, CHECKPOINTED)
    often = {name: case["mlp_calls"] / found[PLAIN]["mlp_calls"] for name, case in found.items()}
    assert often == {PLAIN: 1.0, **dict.fromkeys(KINDS, 2.0), "every_n_layers": 1.5}
    assert_equal(found, 1e-6)


@needs_compiler
@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ("single", ["regional matmul"]),
        *long(("single", [*WITH_CHECKPOINTS, "full", "full matmul"]), ("ddp", [*REGIONAL, "full", "full full"])),
        *long(("fsdp", REGIONAL), ("zero1", ["regional"]), ("zero2", [*REGIONAL, "full"])),
        *long(("pipeline", REGIONAL), ("tp", WITH_CHECKPOINTS), ("fsdp_tp", REGIONAL)),
        *long(*((name, IN_STAGES) for name in ("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved"))),
    ],
)
def test_compiled(strategy, cases, workspace):
    found = probe(workspace, strategy, {name: COMPILED[name] for name in (PLAIN, *cases)})
    assert found[PLAIN]["compiled"] == 0
    for name in cases:
        assert found[name]["compiled"] > 0 and found[name]["recompilations"] < 8, name
    assert_equal(found, 1e-4)
