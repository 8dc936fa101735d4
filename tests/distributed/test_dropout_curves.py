"""Dropout is part of the curve: models at their default rates follow one process under every strategy."""

from __future__ import annotations

import json

import pytest
from harness import STEPS, largest_relative_difference, long, relative_l2
from test_equal_curves import ENGINES

# transformers' defaults: 0.1 of the embeddings, the attention probabilities and what each layer adds
GPT2 = "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 32}"
DEEPER = GPT2.replace("n_layer: 2", "n_layer: 4")
RATES = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
BERT = "{model_type: bert, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64}"
MLM = ("task=mlm", f"model.config={BERT}", "data.packing=false")
OPT = "model.config={model_type: opt, hidden_size: 32, ffn_dim: 64, num_hidden_layers: 2, num_attention_heads: 4, word_embed_proj_dim: 32, attention_dropout: 0.1}"  # noqa: E501
# attention is cut by heads; Phi-3 gathers what it cuts, and drops whole hidden states, too
LLAMA = "model.config={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, attention_dropout: 0.1}"  # noqa: E501
PHI3 = LLAMA.replace("llama", "phi3").replace("}", ", pad_token_id: 0, resid_pdrop: 0.1, embd_pdrop: 0.1}")
PACKED = "data.packing=true"
RECOMPUTED = "memory.activation_checkpointing=full"
PARTLY_RECOMPUTED = "memory.activation_checkpointing=selective"
COMPILED = "compile=regional"


@pytest.fixture(scope="module")
def alone(workspace):
    def run(*overrides: str):
        found = workspace.run(None, 1, *overrides, "batch.micro_batch_size=8")
        assert found.returncode == 0, found.output
        return found

    return run


def assert_follows(run, reference, start: int = 0) -> None:
    assert run.returncode == 0, run.output
    assert run.column("step") == list(range(1, STEPS + 1))
    assert run.column("tokens") == reference.column("tokens")
    assert largest_relative_difference(run.column("loss")[start:], reference.column("loss")[start:]) < 1e-5
    assert largest_relative_difference(run.column("grad_norm")[start:], reference.column("grad_norm")[start:]) < 1e-4
    assert relative_l2(run.weights, reference.weights) < 1e-4


CASES = [
    ("fsdp", 2, (GPT2,), (RECOMPUTED,)),
    ("pipeline_1f1b", 2, (GPT2,), (RECOMPUTED,)),
    ("tp", 2, (LLAMA, PACKED), (RECOMPUTED, "batch.micro_batch_size=4")),
    *long(
        ("pipeline", 2, (GPT2,), (PARTLY_RECOMPUTED,)),
        ("zero1", 2, MLM, ()),
        ("tp", 2, (PHI3, PACKED), ("batch.micro_batch_size=4",)),
        ("tp", 2, (LLAMA, "model.attention=eager"), (COMPILED, "batch.micro_batch_size=4")),
        ("fsdp_tp", 4, (LLAMA, PACKED), ()),
        ("fsdp_tp", 4, (PHI3,), (RECOMPUTED,)),
        ("ddp", 3, (GPT2,), ()),
        ("zero3", 2, (GPT2,), (RECOMPUTED,)),
        ("single", 1, (GPT2,), (COMPILED, "batch.micro_batch_size=3")),
        ("zero2", 2, (GPT2,), ()),
        ("zero2_offload", 2, (GPT2,), ()),
        ("zero3_offload", 2, (GPT2,), ()),
        ("zero3_nvme", 2, (GPT2,), ()),
        ("hsdp", 4, (GPT2,), ()),
        ("pipeline", 4, (GPT2,), ("batch.micro_batch_size=3",)),
        ("pipeline", 2, (GPT2,), ()),
        ("pipeline", 2, (GPT2,), (RECOMPUTED,)),
        ("pipeline", 2, (GPT2,), ("memory.activation_checkpointing=every_n_layers",)),
        ("pipeline", 2, (GPT2,), (PARTLY_RECOMPUTED, COMPILED)),
        ("fsdp", 2, (GPT2,), (COMPILED, RECOMPUTED)),
        ("ddp", 2, (GPT2,), ("compile=full",)),
        ("ddp", 2, (GPT2,), (PARTLY_RECOMPUTED,)),
        ("ddp", 2, (GPT2,), ("memory.activation_checkpointing=offload",)),
        ("pipeline_1f1b", 2, (GPT2,), (PARTLY_RECOMPUTED,)),
        ("pipeline_1f1b", 4, (GPT2, "data.packing=true"), ()),
        ("pipeline_gpipe", 2, (GPT2,), ("memory.activation_checkpointing=every_n_layers",)),
        ("pipeline_interleaved", 2, (DEEPER,), ()),
        ("pipeline_zbv", 2, (DEEPER,), ()),
        ("pipeline_zbv", 2, (DEEPER,), (RECOMPUTED,)),
        ("pipeline_dualpipev", 2, (DEEPER,), (RECOMPUTED,)),
        ("zero3_hpz", 4, (GPT2,), ()),
        ("pipeline_fsdp", 4, (GPT2,), (RECOMPUTED,)),
        ("pp_fsdp_tp", 8, (LLAMA, PACKED), (RECOMPUTED,)),
        ("ddp", 3, MLM, ()),
        ("fsdp", 2, MLM, (COMPILED,)),
        ("pipeline", 2, (GPT2, "data.packing=true"), ()),
        ("ddp", 3, (GPT2, "data.packing=true"), ()),
        ("fsdp", 2, (OPT,), ()),
        ("single", 1, (OPT,), (COMPILED,)),
    ),
]


@pytest.mark.parametrize(("strategy", "world", "model", "more"), CASES)
def test_dropout_follows_one_process(strategy, world, model, more, workspace, alone):
    more = (*more, "batch.micro_batch_size=2") if not any("micro_batch" in each for each in more) else more
    run = workspace.run(None if strategy == "single" else strategy, world, *model, *more)
    assert_follows(run, alone(*model))
    if {GPT2, DEEPER} & {*model}:
        assert run.facts["engine"] == ENGINES[strategy].replace("Llama", "GPT2").replace("ForCausalLM", "LMHeadModel")
    assert run.facts["dropout"] and all(rate == 0.1 for rate in run.facts["dropout"].values())


def test_dropout_changes_the_curve(workspace, alone):
    """Otherwise the tests above would compare models without dropout."""
    without = alone(GPT2.replace("}", "".join(f", {key}: 0.0" for key in RATES) + "}"))
    found = alone(GPT2)
    assert found.facts["dropout"].keys() >= RATES.keys() and not without.facts["dropout"].keys() & RATES.keys()
    differences = [abs(a / b - 1) for a, b in zip(found.column("loss"), without.column("loss"), strict=True)]
    assert differences[0] > 1e-4
    assert len(set(found.column("loss"))) == STEPS


@pytest.mark.parametrize(("origin", "world"), [("ddp", 2), *long(("pipeline", 2), ("pipeline_1f1b", 2), ("zero3", 2))])
def test_another_strategy_and_world_go_on_with_the_same_masks(origin, world, workspace):
    before = workspace.run(origin, world, GPT2, "batch.micro_batch_size=2")
    run = workspace.resume(before, 10, "fsdp", 3, GPT2, "batch.micro_batch_size=2")
    assert_follows(run, before, start=10)


LONG = ("fsdp", "pipeline", "pipeline_1f1b", "pp_fsdp_tp", "tp", "fsdp_tp", "fsdp_cp", "fsdp_ulysses")


@pytest.mark.parametrize("strategy", ["ddp", *long(*LONG, "zero3", "fsdp_tp_cp")])
def test_lora_dropout_follows_one_process(strategy, workspace, alone):
    model = (*workspace.lora, "adapter.dropout=0.3")
    reference = alone(*model)
    world = {"pp_fsdp_tp": 8, "fsdp_tp": 4, "fsdp_tp_cp": 4}.get(strategy, 2)
    run = workspace.run(strategy, world, *model, "batch.micro_batch_size=2")
    assert_follows_adapter(run, reference)
    without = alone(*workspace.lora)
    assert largest_relative_difference(reference.column("loss")[5:], without.column("loss")[5:]) > 1e-5


def assert_follows_adapter(run, reference) -> None:
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), reference.column("grad_norm")) < 1e-4


def test_other_random_numbers_are_refused_by_name(workspace):
    config = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    run = workspace.run(None, 1, f"model.config={json.dumps(config | {'word_embed_proj_dim': 32, 'layerdrop': 0.1})}")
    assert run.returncode == 2, run.output
    assert "model.config: a opt draws random numbers besides dropout" in run.output
    assert "layerdrop: 0.1" in run.output and "to 0 in model.config" in run.output
