"""What each strategy exports is a plain Hugging Face folder, reloaded here, not in the process that trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import launch_command, long
from test_equal_curves import ENGINES, SELDOM, Case, accumulations, libaio_is_installed, run_case
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

WORLDS = {"single": 1, "hsdp": 4, "fsdp_tp": 4, "pipeline_fsdp": 4, "zero3_hpz": 4, "pp_fsdp_tp": 8, "fsdp_tp_cp": 4}


# every day the loss of each strategy's export, below; the logits of one
@pytest.mark.parametrize("strategy", ["zero3", *long(*(name for name in ENGINES if name != "zero3"))])
def test_the_reloaded_model_has_the_live_models_logits(strategy, workspace, tmp_path):
    world = WORLDS.get(strategy, 2)
    path = workspace.strategy(strategy)
    script = str(Path(__file__).with_name("export_probe.py"))
    command = launch_command("fork", path, world, workspace.folder, script)
    micro = {"single": 4, "pipeline": 4, "tp": 4, "hsdp": 1}.get(strategy, 2)
    arguments = [str(workspace.recipe), f"output_dir={tmp_path}", f"batch.micro_batch_size={micro}"]
    run = workspace.execute([*command, *arguments, "--strategy", str(path)], tmp_path)
    assert run.returncode == 0, run.output
    saved = torch.load(tmp_path / "logits.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = model(input_ids=saved["input_ids"], position_ids=saved["position_ids"]).logits
    live = saved["logits"].flatten(0, -2)  # chunks of tokens, or rows of them
    torch.testing.assert_close(logits.flatten(0, 1), live, rtol=1e-5, atol=1e-6)
    assert logits.std() > 0.01


RARE = tuple(name for name in SELDOM if name != "pipeline_1f1b")


@pytest.mark.parametrize("strategy", [*(name for name in ENGINES if name not in RARE), *long(*RARE)])
def test_the_export_of_a_whole_run(strategy, workspace, reference):
    """The loss of the reloaded model over every held-out row is the one that the training process measured last."""
    if strategy == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    run = run_case(workspace, Case(strategy, WORLDS.get(strategy, 2), max(accumulations(strategy)[0], 2)))
    folder = run.directory / "model"
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    loss, tokens = held_out_loss(workspace, model)
    measured = run.metrics[-1]
    assert tokens == measured["eval_tokens"]
    assert loss == pytest.approx(measured["eval_loss"], rel=1e-6)


def held_out_loss(workspace, model) -> tuple[float, int]:
    from samecurve.config import loader
    from samecurve.data.batches import EvaluationBatches
    from samecurve.tasks import registry

    task = registry.load_task(loader.read_recipe(str(workspace.recipe)).recipe)
    total, tokens = 0.0, 0
    for batch in EvaluationBatches(task.validation, 8, (0, 1)):
        with torch.no_grad():
            logits = model(**batch.inputs).logits.double()
        total += cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").item()
        tokens += int((batch.labels != -100).sum())
    return total / tokens, tokens
