"""What a CPU cannot show: the same curves, options and checkpoints on real GPUs. See scripts/test_gpu.sh.

With $SAMECURVE_REHEARSE_GPU_TESTS set it runs where there is no GPU, to try the tests themselves; the number there is
that of the devices that processes stand for.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from harness import LLAMA, RECIPE, ROOT, Run, Workspace
from test_equal_curves import ENGINES as ON_A_CPU
from test_equal_curves import SCHEDULES

from samecurve.accelerator import cpu_bridge
from samecurve.bench.memory_probe import CONTEXT, KERNELS
from samecurve.optim import adamw_bf16
from samecurve.planner.calibrate import COMMUNICATORS
from samecurve.strategy.placement import place_strategy

ON_GPU = torch.cuda.is_available()
ROWS = RECIPE["batch"]["global_batch_size"]
_FOUND = torch.cuda.device_count() if ON_GPU else int(os.environ.get("SAMECURVE_REHEARSE_GPU_TESTS", 1))
NUM_DEVICES = max(size for size in (1, 2, 4, 8) if size <= min(_FOUND, ROWS))  # each has as many of a step's rows
SHARED = 2 if NUM_DEVICES == 1 else 0
"""Processes on a single GPU over gloo: slow, but with the GPU's kernels under strategies of several ranks."""
WORLDS = sorted({1, NUM_DEVICES, SHARED} - {0})
ENGINES = ON_A_CPU | ({"fsdp_offload": ON_A_CPU["fsdp"]} if ON_GPU else {})
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
CONFIG = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # flex_attention wants 16 at least
OVERRIDES = (
    "data.packing=true",
    "optimizer.learning_rate=5e-4",  # so that rounding stays small over the steps of a whole run
    f"model={json.dumps({'config': CONFIG, 'attention': 'sdpa'})}",
)
OPTIMIZER = {"learning_rate": 5e-4, "max_grad_norm": 0.8}
FP32, BF16 = (1e-4, 1e-3), (5e-3, 5e-2)
"""Largest relative difference in loss and in gradient norm; those of bf16 are to fp32, see test_equal_curves.py."""
TOLERANCES = {"fp32": FP32, "bf16": BF16}

EXACT = {
    "eager": {"model": {"config": CONFIG, "attention": "eager"}},
    "flex": {"model": {"config": CONFIG, "attention": "flex_attention"}},
    "all logits": {"loss": {"implementation": "full"}},
    "full": {"memory": {"activation_checkpointing": "full"}},
    "selective": {"memory": {"activation_checkpointing": "selective"}},
    "offload": {"memory": {"activation_checkpointing": "offload"}},
    "compiled": {"compile": "regional"},
    "foreach": {"optimizer": {**OPTIMIZER, "implementation": "foreach"}},
    "liger": {
        "model": {"config": CONFIG, "attention": "sdpa", "kernels": "liger"},
        "loss": {"implementation": "liger"},
    },
}
ROUNDED = {
    "bf16": {},
    "eager": {"model": {"config": CONFIG, "attention": "eager"}},
    "varlen": {"model": {"config": CONFIG, "attention": "varlen"}},
    "varlen compiled": {"model": {"config": CONFIG, "attention": "varlen"}, "compile": "regional"},
    "varlen selective": {
        "model": {"config": CONFIG, "attention": "varlen"},
        "memory": {"activation_checkpointing": "selective", "selective_save": "attention"},
    },
    "flex": {"model": {"config": CONFIG, "attention": "flex_attention"}},
    "adamw_bf16": {"optimizer": {**OPTIMIZER, "name": "adamw_bf16"}},
    "kahan": {"optimizer": {**OPTIMIZER, "name": "adamw_bf16", "bf16_rounding": "kahan"}},
    "fp16": {"loss": {"implementation": "full"}},
}
if not ON_GPU:  # flex_attention has no gradients there, and fp16 no matrix products
    EXACT.pop("flex"), ROUNDED.pop("flex"), ROUNDED.pop("fp16")
if not ON_GPU or find_spec("liger_kernel") is None:
    EXACT.pop("liger")
STRATEGIES = [name for name in ENGINES if name not in ("single", "tp", "pipeline", "zero3_nvme")]
CASES = [
    (name, world)
    for name in STRATEGIES
    # those that the strategy can be spread over; a schedule's micro-batches would have no row on each of 8
    for world in (sorted({*WORLDS, min(NUM_DEVICES, 4)}) if name in SCHEDULES else WORLDS)
    if place_strategy(ROOT / "configs" / f"{name}.yaml", world).world_size == world
]
# gloo has no point-to-point transfers of device memory, see accelerator/cpu_bridge.py
CASES = [(name, world) for name, world in CASES if name not in SCHEDULES or world <= min(NUM_DEVICES, 4)]
CASES += [("pipeline", NUM_DEVICES)] if NUM_DEVICES > 1 else []
CASES += [("tp", 2)]  # the one number that its file allows; a single GPU is shared


def rows_at_once(strategy: str, world: int) -> str:
    """The override: four, or what a step has for each of more ranks; schedules have four micro-batches."""
    if strategy in SCHEDULES:
        return f"batch.micro_batch_size={ROWS // 2 // world}"
    stages = 2 if strategy == "pipeline" else 1
    return f"batch.micro_batch_size={min(4, ROWS * stages // world)}"


def needs(strategy: str) -> None:
    if ENGINES[strategy] in ("DeepSpeedEngine", "PipelineEngine") and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")


@pytest.fixture(scope="session")
def probe(workspace):
    """(strategy, world, precision, {recipe key: value}) -> what options_probe.py finds."""

    @cache
    def probed(strategy: str, world: int, precision: str, keys: str, **environment: str) -> dict:
        needs(strategy)
        alone = strategy == "single"
        overrides = *OVERRIDES, rows_at_once(strategy, world), f"precision={precision}"
        environment |= {cpu_bridge.SHARE_GPUS: "1"} if world > NUM_DEVICES else {}
        environment |= {"CASES": f'{{"case": {keys}}}'}
        launcher = "python" if alone else "torchrun"
        name = None if alone else strategy
        found = workspace.probe("options_probe.py", name, world, *overrides, launcher=launcher, **environment)["case"]
        bare = ON_GPU and (strategy, world) == ("ddp", 1)  # Accelerate wraps one process on a CPU alone
        assert found["engine"] == ENGINES["single" if bare else strategy]
        return found

    def of(strategy: str, world: int, precision: str, keys: dict | None = None, **environment: str) -> dict:
        return probed(strategy, world, precision, json.dumps(keys or {}), **environment)

    return of


def assert_close(found: dict, expected: dict, tolerances: tuple[float, float]) -> None:
    for key, tolerance in zip(("loss", "norm", "eval_loss"), (*tolerances, tolerances[0]), strict=True):
        assert found[key] == pytest.approx(expected[key], rel=tolerance) and min(expected[key]) > 1e-3, key


@pytest.fixture(scope="session")
def single(probe) -> dict:
    """One process on one device in fp32."""
    return probe("single", 1, "fp32")


def test_a_gpu_follows_a_cpu(probe, single):
    assert_close(single, probe("single", 1, "fp32", **NO_GPU), FP32)


@pytest.mark.parametrize("name", EXACT)
def test_in_fp32_an_option_changes_nothing(name, probe, single):
    assert_close(probe("single", 1, "fp32", EXACT[name]), single, FP32)


@pytest.mark.parametrize("name", ROUNDED)
def test_in_16_bits_an_option_stays_near(name, probe, single):
    precision = "fp16" if name == "fp16" else "bf16"
    assert_close(probe("single", 1, precision, ROUNDED[name]), single, BF16)


@pytest.mark.parametrize("kahan", [False, True])
def test_adamw_bf16_updates_in_one_kernel(kahan):
    """Without one it only warns."""
    assert adamw_bf16.compiled_update_agrees(torch.device("cuda" if ON_GPU else "cpu"), kahan)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_a_strategy_follows_one_process(strategy, world, precision, probe, single):
    assert_close(probe(strategy, world, precision), single, TOLERANCES[precision])


@pytest.fixture(scope="session")
def whole(workspace) -> Run:
    return run(workspace, "single")


def run(workspace: Workspace, strategy: str, *overrides: str) -> Run:
    """On one device."""
    needs(strategy)
    path, launcher = (None, "python") if strategy == "single" else (strategy, "torchrun")
    found = workspace.run(path, 1, *OVERRIDES, rows_at_once(strategy, 1), *overrides, launcher=launcher)
    assert found.returncode == 0, found.output
    assert found.facts["device"] == (torch.cuda.get_device_name() if ON_GPU else "cpu")
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "zero3", "zero2_offload"])
def test_a_checkpoint_of_a_gpu_goes_on_under_another_strategy_and_on_a_cpu(strategy, workspace, whole, monkeypatch):
    begun = run(workspace, strategy)
    for key in ("loss", "grad_norm"):
        assert begun.column(key) == pytest.approx(whole.column(key), rel=1e-3), key
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # not forked: a library that has looked for GPUs before has found those that this process must not see
    ended = workspace.resume(begun, 10, None, 1, *OVERRIDES, rows_at_once("single", 1), launcher="python")
    assert ended.returncode == 0 and ended.facts["device"] == "cpu", ended.output
    assert ended.column("loss")[10:] == pytest.approx(whole.column("loss")[10:], rel=1e-3)


def test_the_memory_beside_tensors(workspace):
    """Published: 0.9 GB of context, and 1.45 GB at the first barrier; a CPU's process has libraries instead."""
    file = workspace.folder / "memory.json"
    command = [sys.executable, "-m", "samecurve", "bench", "memory", "--json", str(file)]
    found = workspace.execute(command, workspace.folder)
    assert found.returncode == 0, found.output
    parts = json.loads(file.read_text())["parts_gib"]["torch"]
    assert [*parts][: 2 if ON_GPU else 1] == ([CONTEXT, KERNELS] if ON_GPU else ["Python, torch"])
    assert (COMMUNICATORS in parts) == (ON_GPU and torch.cuda.device_count() > 1)
    assert 0.2 < sum(parts.values()) - parts.get(COMMUNICATORS, 0) < 2
    assert 0 <= parts.get(COMMUNICATORS, 0) < 4


def test_what_is_measured_on_a_gpu(workspace):
    """Peak memory, utilization against the device's peak, and a profile of its kernels."""
    found = run(workspace, "single", "steps=8", "profile.steps=[5, 6]", "precision=bf16")
    assert all(record["peak_memory_gib"] > 0 and 0 < record["mfu"] <= record["hfu"] < 1 for record in found.metrics[1:])
    summary = json.loads((found.directory / "profile" / "summary.json").read_text())
    assert bool(summary.get("on_device")) == ON_GPU
    assert sum(summary["shares"].values()) == pytest.approx(1, abs=0.02)
    assert any((found.directory / "profile").rglob("*.memory.pickle")) == ON_GPU
