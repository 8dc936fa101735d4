"""The check of a session's first update finds what does not follow the recipe, under every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Workspace, long
from test_equal_curves import ENGINES, libaio_is_installed
from test_router_curves import MODEL

from samecurve.bench.step import write_changed

WORLDS = {"single": 1, "hsdp": 4, "fsdp_tp": 4, "zero3_hpz": 4, "pp_fsdp_tp": 8, "fsdp_tp_cp": 4}
EVERY_DAY = ["fsdp", "zero3", "pipeline"]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *((name, "fp32") for name in EVERY_DAY),
        *long(*((name, "fp32") for name in ENGINES if name not in EVERY_DAY)),
        *long(*((name, "bf16") for name in ENGINES), ("ddp", "fp16"), ("fsdp", "fp16")),
    ],
)
def test_planted_differences_are_found(strategy, precision, workspace):
    if strategy == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    found = probe(workspace, strategy, WORLDS.get(strategy, 2), f"precision={precision}")
    assert found["engine"] == ENGINES[strategy]
    assert_found(found, strategy)


@pytest.mark.parametrize("strategy", ["zero2", *long("ddp", "fsdp", "zero3", "pipeline", "pipeline_1f1b")])
def test_planted_differences_are_found_with_an_adapter(strategy, workspace):
    # the gradients of an adapter are small
    found = probe(workspace, strategy, 2, *workspace.lora, "optimizer.max_grad_norm=0.001")
    assert_found(found, strategy, max_grad_norm=0.001)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("fsdp_ep", 2), ("fsdp_ep", 4), ("fsdp_ep_tp", 4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planted_differences_are_found_with_experts(strategy, world, precision, workspace):
    """On 4 processes two share each expert: half of it under fsdp_ep, a copy each under fsdp_ep_tp."""
    found = probe(workspace, strategy, world, f"precision={precision}", MODEL)
    assert found["engine"] == "FSDPMixtralForCausalLM"
    assert_found(found, strategy)


@pytest.mark.parametrize("strategy", ["zero2", *long("pipeline")])
def test_masters_linked_to_other_weights(strategy, workspace):
    """As DeepSpeed links them under round_robin_gradients, see deepspeed_introspection.link_masters."""
    key = "zero_optimization.round_robin_gradients=true"
    path = write_changed(workspace.strategy(strategy), (key,), workspace.folder / f"unlinked_{strategy}")
    found = probe(workspace, path, 2 if strategy == "zero2" else 4, UNLINKED="1")
    assert "the weights that the model computes with are not the optimizer's" in found["as it should be"]


def probe(
    workspace: Workspace, strategy: str | Path, world: int, *overrides: str, **environment: str
) -> dict[str, str]:
    rows = "batch.micro_batch_size=1"
    return workspace.probe("first_step_probe.py", strategy, world, *overrides, rows, **environment)


def assert_found(found: dict[str, str], strategy: str, max_grad_norm: float = 0.8) -> None:
    assert found["as it should be"] == "" and found["later"] == "", found
    masters = {"written elsewhere": "the weights that the model computes with are not the optimizer's: "}
    for key, text in (
        ("rows", "batch.global_batch_size: each of 8 rows has to be read once, but row 0 was read"),
        ("learning rate", "optimizer.learning_rate: the schedule says 0.001, but the optimizer used 0.002"),
        ("clipping", f"optimizer.max_grad_norm: {max_grad_norm} makes a gradient norm of"),
        ("not applied", "optimizer.name: adamw should move a value by"),
        ("applied twice", "optimizer.name: adamw should move a value by"),
        *(masters.items() if found["engine"] in ("DeepSpeedEngine", "PipelineEngine") else ()),
    ):
        header, line, *_ = found[key].splitlines()
        assert f"strategy {strategy}: the first step did not do what the recipe says" in header
        assert text in line and len(found[key].splitlines()) == 3, found[key]
