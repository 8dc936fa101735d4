"""A loss or gradient that is not finite: every engine skips the step on all ranks, untouched, and goes on the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import long
from safetensors.torch import load_file, save_file
from test_equal_curves import ENGINES, LOSS, NORM, SCHEDULES

STRATEGIES = ["ddp", "fsdp", "zero1", "zero2_offload", "zero3", "pipeline", "pipeline_1f1b"]
# what is not run is one of the others where it matters: the shared step, or the same DeepSpeed optimizer class
SAME_CODE = {
    "single": "ddp",
    "hsdp": "fsdp",
    "tp": "ddp",
    "fsdp_tp": "fsdp",
    "fsdp_ulysses": "fsdp",
    "fsdp_cp": "fsdp",
    "fsdp_tp_cp": "fsdp",
    "zero2": "zero2_offload",
    "zero3_offload": "zero3",
    "zero3_nvme": "zero3",
    "zero3_hpz": "zero3",
    **dict.fromkeys(set(SCHEDULES) - {"pipeline_1f1b"}, "pipeline_1f1b"),
}
SELDOM = ("zero1", "zero2_offload", "pipeline")
OTHER_CODE_IN_BF16 = ["zero1", "zero3", "pipeline"]  # other optimizer classes, or bf16 weights beside fp32 masters


def test_every_strategy_is_covered():
    assert {*STRATEGIES, *SAME_CODE} == ENGINES.keys()
    assert {*SAME_CODE.values(), *OTHER_CODE_IN_BF16} <= {*STRATEGIES}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *((name, "fp32") for name in STRATEGIES if name not in SELDOM),
        *long(*((name, "fp32") for name in SELDOM), *((name, "bf16") for name in OTHER_CODE_IN_BF16)),
    ],
)
def test_the_step_is_skipped_and_nothing_stays_of_it(strategy, precision, workspace, single):
    found = probe(strategy, precision, workspace)
    assert found["engine"] == ENGINES[strategy]
    assert "the loss is nan" in found["loss"]
    assert "gradient norm is" in found["gradient"]
    assert found["untouched by loss"] and found["untouched by gradient"]
    assert len(found["after"]) == 4
    for (loss, norm), (expected_loss, expected_norm) in zip(found["after"], single["after"], strict=True):
        assert abs(loss / expected_loss - 1) < LOSS[precision]
        assert abs(norm / expected_norm - 1) < NORM[precision]


@pytest.fixture(scope="module")
def single(workspace) -> dict:
    return probe("single", "fp32", workspace)


def probe(strategy: str, precision: str, workspace) -> dict:
    overrides = f"precision={precision}", "batch.micro_batch_size=2"
    return workspace.probe("nonfinite_probe.py", strategy, 1 if strategy == "single" else 2, *overrides)


@pytest.mark.parametrize("strategy", [None, "zero3", *long("ddp", "pipeline")])
def test_the_run_ends_with_code_5_and_says_so(strategy, workspace, reference, tmp_path):
    """The logits of some tokens overflow, so no step has a loss. Weights that are no numbers would not be loaded."""
    model = poisoned(reference.directory / "model", tmp_path / "model")
    arguments = (f"model={{path: {model}}}", f"tokenizer={{path: {model}}}", "batch.micro_batch_size=4")
    world = 1 if strategy is None else 2
    run = workspace.run(strategy, world, *arguments)
    assert run.returncode == (5 if strategy is None else 1), run.output  # launchers turn every code into 1
    assert run.status["state"] == "failed" and run.status["exit_code"] == 5, run.status
    assert "the loss is nan" in run.status["reason"] and "That is 4 skipped steps in a row" in run.status["reason"]
    skipped = [json.loads(line) for line in (run.directory / "skipped.jsonl").read_text().splitlines()]
    assert [record["step"] for record in skipped][-4:] == list(
        range(run.status["step"] + 1 - 3, run.status["step"] + 2)
    )
    assert all(len(record["rows"]) == 8 for record in skipped)
    assert not (run.directory / "checkpoints").exists()  # weights that are not numbers are never committed
    assert run.output.count("NumericError (exit code 5)") == 1
    assert not (run.directory / "model").exists()


def poisoned(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.name != "SHA256SUMS":  # the weights are changed on purpose
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head][70:80] = 3e38
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
