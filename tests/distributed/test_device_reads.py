"""How often a step reads a tensor's value, because on a GPU each read waits for all queued kernels."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from harness import long
from reads import Reads
from test_equal_curves import CUT_ROWS, ENGINES, SCHEDULES
from torch import Tensor

PROBE = "device_reads_probe.py"
WORLDS = {"single": 1, "hsdp": 4, "fsdp_tp": 4, "zero3_hpz": 4, "fsdp_tp_cp": 4}
WAIT = "engines/step_sums.py: read"  # of loss, statistics and routers; their copy began before that of the norm
NORM = "accelerator/accelerator.py: clip_grad_norm_"  # the only wait for what was queued, beside the update
ON_HOST = "engines/accelerated.py: step"  # of the norm, which is on the host by then
COUNTS = "accelerator/mesh.py: count"  # of sums on the CPU
DROPOUT = "models/dropout.py: _of"  # MicroBatch.places, which stay on the CPU
OF_PART = "losses/chunked_cross_entropy.py: trained_positions"  # of a part's labels, before their copy to the device
MIXTRAL = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "router_aux_loss_coef": 1.0}
VARLEN = "data.packing=true", "model.attention=varlen"
ROUTERS = f"model.config={json.dumps(MIXTRAL)}", "model.router_loss=batch", "data.packing=true"


@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        ("single", ROUTERS),
        ("fsdp", ()),
        ("zero1", ()),
        *long(*((name, ()) for name in ENGINES if name not in ("fsdp", "zero1", "pipeline", "zero3_nvme", *SCHEDULES))),
        *long(
            ("single", VARLEN),
            ("ddp", ROUTERS),
            ("fsdp", (*ROUTERS, "loss.implementation=full", "model.attention=eager")),
        ),
    ],
)
def test_a_step_waits_once(strategy, overrides, workspace):
    found = workspace.probe(PROBE, strategy, WORLDS.get(strategy, 2), "batch.micro_batch_size=2", *overrides)
    allowed = {WAIT: 1, NORM: 1, ON_HOST: 1}
    allowed |= {COUNTS: 1, DROPOUT: found["num_micro_batches"]}
    allowed |= {OF_PART: 2 * found["num_micro_batches"] if strategy in CUT_ROWS else 0}
    if overrides:
        allowed |= {DROPOUT: allowed[DROPOUT] * (1 if overrides == VARLEN else 2)}  # with routers the layers run twice
        assert found["packed"]
    assert found["engine"] == ENGINES[strategy] or overrides
    reads = Reads()
    reads.found = found["reads"]
    assert WAIT in {place for place, *_ in reads.found}
    extra = reads.unexpected(allowed)
    assert not extra, "\n\n".join(f"{place} ({kind}) waits for the device:\n{stack}" for place, kind, stack in extra)


@pytest.mark.full
def test_a_read_in_the_middle_is_found_with_its_stack(workspace):
    found = workspace.probe(PROBE, "single", 1, "batch.micro_batch_size=2", PLANT_A_READ="1")
    planted = [stack for _, kind, stack in found["reads"] if kind == "item"]
    assert len(planted) == found["num_micro_batches"] and PROBE in planted[0], found["reads"]


def index_put(values: Tensor) -> None:
    values[values > 1] = torch.ones(2)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("item", Tensor.item),
        ("tolist", Tensor.tolist),
        ("numpy", Tensor.numpy),
        ("cpu", Tensor.cpu),
        ("to", lambda values: values.to("cpu")),
        ("__bool__", lambda values: bool(values[0])),
        ("__float__", lambda values: float(values[0])),
        ("nonzero", Tensor.nonzero),
        ("equal", lambda values: torch.equal(values, values)),
        ("index", lambda values: values[values > 1]),
        ("index_put_", index_put),
        ("__getitem__", lambda values: values[[0, 1]]),
        ("tensor", lambda values: torch.tensor([1.0], device=values.device)),
    ],
)
def test_each_kind_of_read_counts_once(kind: str, call: Callable[[Tensor], object]):
    values = torch.arange(1.0, 4.0)
    with Reads() as reads:
        call(values[:1] if kind == "item" else values)
    assert [(place, found) for place, found, _ in reads.found] == [("elsewhere", kind)]


def test_what_stays_on_the_device_does_not_count():
    values = torch.arange(4.0)
    with Reads() as reads:
        values[values > 1] = 0.0
        torch.where(values.sum().isfinite(), 1.0, float("nan")) * values[values.long()].to(values.device)
    assert not reads.found
