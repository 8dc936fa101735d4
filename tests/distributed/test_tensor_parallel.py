"""Tensor parallelism in the cases that test_equal_curves.py and test_resume.py do not have, against one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Run, largest_relative_difference, long, relative_l2

from samecurve.specs.environment import dated

RECOMPUTED = "memory.activation_checkpointing=full"
LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# untied; with norms of each head, whose gradient is a sum over ranks; with packed weights; with capped logits
CONFIGS = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "starcoder2": {},
}
NOT_CHUNKABLE = ("gemma2",)


def model_config(family: str, **changes: object) -> str:
    fields = {"model_type": family, **SIZES, **CONFIGS[family], **changes}
    return f"model.config={json.dumps({key: value for key, value in fields.items() if value is not None})}"


def short_run(workspace, strategy: str | Path | None, world: int, micro_batch: int, *overrides: str) -> Run:
    settings = "steps=6", "checkpoint.every_steps=0", f"batch.micro_batch_size={micro_batch}"
    run = workspace.run(strategy, world, *settings, *overrides)
    assert run.returncode == 0, run.output
    return run


def assert_equal(run: Run, expected: Run) -> None:
    assert run.column("tokens") == expected.column("tokens")
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < NORM
    assert relative_l2(run.weights, expected.weights) < WEIGHTS


@pytest.mark.parametrize(
    ("family", "strategy", "world"),
    [
        *(("llama", "tp", 2), ("qwen3", "tp", 2)),
        *long(*((family, "tp", 2) for family in CONFIGS if family not in ("llama", "qwen3"))),
        *long(*((family, "fsdp_tp", 4) for family in CONFIGS)),
    ],
)
def test_families_on_packed_rows(family, strategy, world, workspace):
    """Two micro-batches of documents of uneven length: gradients that are summed twice are seen only then."""
    config = model_config(family)
    expected = short_run(workspace, None, 1, 8, config, "data.packing=true")
    run = short_run(workspace, strategy, world, 4 // (world // 2), config, "data.packing=true")
    assert (run.facts["tensor_parallel_size"], run.facts["gradient_accumulation_steps"]) == (2, 2)
    assert run.facts["loss_implementation"] == ("full" if family in NOT_CHUNKABLE else "chunked")
    assert "2 tensor-parallel" in run.output
    assert_equal(run, expected)


@pytest.mark.parametrize(
    ("family", "strategy", "world", "more"),
    [
        ("llama", "tp", 2, ()),
        *long(*((family, "tp", 2, ()) for family in CONFIGS if family not in ("llama", "phi3"))),
        *long(*((family, "fsdp_tp", 4, ()) for family in ("llama", "qwen3", "gemma2"))),
        *long(("llama", "tp", 2, ("compile=regional", RECOMPUTED)), ("llama", "fsdp_tp", 4, (RECOMPUTED,))),
    ],
)
def test_sequence_parallelism(family, strategy, world, more, workspace):
    config = model_config(family)
    expected = short_run(workspace, None, 1, 8, config, "data.packing=true")
    path = workspace.sequence_parallel(strategy)
    run = short_run(workspace, path, world, 4 // (world // 2), config, "data.packing=true", *more)
    assert run.facts["tp_sequence_parallel"] and run.facts["gradient_accumulation_steps"] == 2
    assert_equal(run, expected)
    found, wanted = run.metrics[-1], expected.metrics[-1]
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=LOSS)


@pytest.mark.full
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_in_four_parts(family, sequence_parallel, workspace):
    """One head of queries, keys and values on each rank."""
    config = model_config(family, num_key_value_heads=4)
    expected = short_run(workspace, None, 1, 8, config, "data.packing=true")
    changes = {"tp_size": 4, **({"tp_sequence_parallel": "true"} if sequence_parallel else {})}
    run = short_run(workspace, workspace.parallel("tp", **changes), 4, 4, config, "data.packing=true")
    facts = run.facts
    assert (facts["tensor_parallel_size"], facts["data_parallel_size"], facts["strategy"]) == (4, 1, "tp")
    assert (facts["gradient_accumulation_steps"], facts["tp_sequence_parallel"]) == (2, sequence_parallel)
    assert facts["num_parameters_per_rank"] < 0.3 * facts["num_parameters"]  # norms are whole on each
    assert "4 tensor-parallel" in run.output
    assert_equal(run, expected)


def test_phi3_has_no_sequence_parallelism(workspace):
    config = model_config("phi3")
    run = workspace.run(workspace.sequence_parallel("tp"), 2, "steps=6", "batch.micro_batch_size=8", config)
    assert run.returncode != 0 and "tp_sequence_parallel: found true, but" in run.output


def test_the_families_are_all_that_are_allowed():
    from samecurve.specs.model_families import families

    assert CONFIGS.keys() == families("tensor_parallel")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_key_value_heads": 1}, ("num_key_value_heads is 1", "sizes: 1")),
        *long(
            (
                {"model_type": "gpt_neox", "num_key_value_heads": None},
                (f"plan of a gpt_neox in {dated('transformers')} leaves its embedding whole", "llama", "fsdp.yaml"),
            )
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(config, words, workspace):
    fields = {"model_type": "llama", **SIZES, **config}
    fields = {key: value for key, value in fields.items() if value is not None}
    run = workspace.run("tp", 2, "steps=6", "batch.micro_batch_size=8", f"model.config={json.dumps(fields)}")
    assert run.returncode != 0 and "ConfigurationError" in run.output
    for word in (*words, "configs/tp.yaml", "parallelism_config_tp_size: found 2"):
        assert word in run.output
