"""What a strategy can be set to beside its default, against one process with the same model."""

from __future__ import annotations

import json

import pytest
from harness import LLAMA, ROOT, Run, largest_relative_difference, long, relative_l2

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
SMALLEST = {"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
ALBERT = {
    "model_type": "albert",
    "embedding_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS = {
    "tied llama": LLAMA,
    "untied llama": {**LLAMA, "tie_word_embeddings": False},
    "gpt2": GPT2,
    "albert": ALBERT,
    "tiny llama": LLAMA | SMALLEST,
}
PIPELINE = json.loads((ROOT / "ds_configs" / "pipeline.json").read_text())
FULL = "memory.activation_checkpointing=full"


def stages(**changes) -> dict:
    return {"pipeline": {**PIPELINE["pipeline"], **changes}}


@pytest.mark.parametrize(
    ("model", "changes", "overrides"),
    [
        pytest.param("gpt2", {}, (), id="gpt2"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.full)
            for name, case in {
                "untied": ("untied llama", {}, ()),
                "zero0": ("tied llama", {"zero_optimization": {"stage": 0}}, ()),
                "uniform": ("tied llama", stages(partition="uniform"), ()),
                "by type": ("tied llama", stages(partition="type:decoder"), ()),
                "recomputed": ("tied llama", stages(activation_checkpoint_interval=1), (FULL,)),
            }.items()
        ),
    ],
)
def test_pipeline(model, changes, overrides, workspace):
    path = workspace.strategy("pipeline", **changes) if changes else workspace.strategy("pipeline")
    run = workspace.run(path, 2, _model(model), "batch.micro_batch_size=4", *overrides)
    follows(run, workspace, model)
    assert run.facts["engine"] == "PipelineEngine" and run.facts["pipeline_stages"] == 2
    assert run.facts["zero_stage"] == changes.get("zero_optimization", {"stage": 1})["stage"]
    assert run.facts["activation_checkpoint_interval"] == (1 if overrides else 0)


@pytest.mark.parametrize("strategy", long("ddp", "fsdp", "zero3"))
def test_recomputed_activations(strategy, workspace):
    run = workspace.run(strategy, 2, _model("tied llama"), "batch.micro_batch_size=4", FULL)
    follows(run, workspace, "tied llama")
    assert run.facts["recipe"]["memory"]["activation_checkpointing"] == "full"
    assert run.metrics[-1]["hfu"] > run.metrics[-1]["mfu"]


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("untied llama", "zero3"), *long(("gpt2", "fsdp"), ("untied llama", "fsdp"), ("gpt2", "zero3"))],
)
def test_other_models(model, strategy, workspace):
    follows(workspace.run(strategy, 2, _model(model), "batch.micro_batch_size=4"), workspace, model)


def test_a_layer_that_runs_three_times_per_step(workspace):
    """ALBERT's, under ZeRO-2 in bf16, for which DeepSpeed issue 8224 reports wrong gradients."""
    shared = _model("albert"), "task=mlm", "precision=bf16", "steps=8"
    found = workspace.run("zero2", 2, *shared, "batch.micro_batch_size=2")
    expected = workspace.run(None, 1, *shared, "batch.micro_batch_size=8")
    assert (found.returncode, expected.returncode) == (0, 0), found.output + expected.output
    # one process casts fp32 weights for each layer, DeepSpeed keeps them in bf16
    assert largest_relative_difference(found.column("loss"), expected.column("loss")) < 1e-3
    assert largest_relative_difference(found.column("grad_norm"), expected.column("grad_norm")) < 1e-2


@pytest.mark.parametrize(("strategy", "precision"), [("zero2", "fp32"), *long(("zero1", "fp32"), ("zero1", "bf16"))])
def test_a_rank_without_a_share_of_a_group(strategy, precision, workspace):
    """The norms, a group of their own, have 6 values. DeepSpeed gives 2 of 8 to each rank, the last only padding."""
    shared = _model("tiny llama"), f"precision={precision}", "steps=10"
    found = workspace.run(strategy, 4, *shared, "batch.micro_batch_size=2")
    expected = workspace.run(None, 1, *shared, "batch.micro_batch_size=8")
    assert (found.returncode, expected.returncode) == (0, 0), found.output + expected.output
    again = workspace.resume(found, 5, strategy, 4, *shared, "batch.micro_batch_size=2")
    assert again.returncode == 0, again.output
    assert again.column("loss") == found.column("loss")
    exact = precision == "fp32"
    assert largest_relative_difference(found.column("loss"), expected.column("loss")) < (1e-5 if exact else 5e-3)
    assert relative_l2(found.weights, expected.weights) < (1e-4 if exact else 2e-2)


def _model(name: str) -> str:
    return f"model.config={json.dumps(MODELS[name])}"


def follows(run: Run, workspace, model: str) -> None:
    expected = workspace.run(None, 1, _model(model), "batch.micro_batch_size=8")
    assert expected.returncode == 0, expected.output
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    assert relative_l2(run.weights, expected.weights) < 1e-4
