"""What is fp32 in a bf16 run is so under every strategy: A_log, dt_bias and D of a recurrence, and rotary angles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import launch_command, long
from test_equal_curves import ENGINES

MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 1,
    "chunk_size": 8,
}


def trained(workspace, strategy: str | None, world: int, *more: str) -> dict:
    folder = workspace.folder / f"recurrent_{len(list(workspace.folder.iterdir()))}"
    folder.mkdir()
    path = workspace.strategy(strategy) if strategy else None
    command = launch_command("fork", path, world, folder, str(Path(__file__).with_name("recurrence_probe.py")))
    command += [str(folder / "result.json"), str(workspace.recipe), f"model.config={json.dumps(MAMBA2)}"]
    command += ["precision=bf16", f"batch.micro_batch_size={8 // world // 2}", f"output_dir={folder / 'run'}", *more]
    run = workspace.execute([*command, *(["--strategy", str(path)] if path else [])], folder)
    assert run.returncode == 0, run.output
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def single(workspace) -> dict:
    return trained(workspace, None, 1)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("single", 1), ("fsdp", 2), ("zero2", 2), *long(("ddp", 2), ("hsdp", 4), ("zero1", 2), ("zero3", 2))],
)
def test_a_recurrence_is_computed_in_fp32(strategy, world, single, workspace):
    found = single if strategy == "single" else trained(workspace, strategy, world)
    assert found["engine"] == ENGINES[strategy].replace("LlamaForCausalLM", "Mamba2ForCausalLM")
    assert found["differences"] == [0.0] * 5
    assert found["losses"] == pytest.approx(single["losses"], rel=5e-3)
    for name, values in found["weights"].items():
        assert values == pytest.approx(single["weights"][name], abs=1e-4), name


def test_angles_between_layers_are_fp32(workspace):
    """Those of OLMo 2: FSDP with one shard computes what one process does, bit for bit."""
    fields = {"model_type": "olmo2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    overrides = [f"model.config={json.dumps(fields | {'num_attention_heads': 4})}", "precision=bf16"]
    overrides += ["batch.sequence_length=256", "batch.micro_batch_size=4"]
    found, alone = (workspace.probe("buffers_probe.py", strategy, 1, *overrides) for strategy in ("fsdp", None))
    assert found["engine"] == ENGINES["fsdp"].replace("Llama", "Olmo2")
    assert found["losses"] == alone["losses"] and len(found["losses"]) == 2


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_bf16_weights_leave_a_recurrence_in_fp32(strategy, single, workspace):
    world = 2 if strategy == "fsdp" else 1
    found = trained(workspace, strategy, world, "optimizer.name=adamw_bf16")
    assert found["differences"] == [0.0] * 5
    for name, values in found["weights"].items():
        assert values == pytest.approx(single["weights"][name], abs=1e-3), name
