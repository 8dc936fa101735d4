"""What the planner reads from a recipe, as the run will decide it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_families import packaged_config, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.engines.loss_implementation import is_chunkable
from samecurve.models.packaged import text_config
from samecurve.planner import inputs, model_shape, plan_text, search, step_time, strategies
from samecurve.planner.activations import layer_bytes
from samecurve.planner.cluster import built_in
from samecurve.planner.strategies import read
from samecurve.specs.model_families import PACKAGED, families

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}


def wanted(tmp_path: Path, family: str, *overrides: str, **fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **SMALL, **fields}))
    return inputs.read(str(path), overrides)


@pytest.mark.parametrize(
    ("family", "overrides", "chunked"),
    [
        ("llama", [], True),
        ("llama", ["loss.implementation=full"], False),
        ("llama", ["precision=fp16"], False),
        ("llama", ["task=dpo"], True),
        ("llama", ["task=reward"], False),
        ("gemma2", [], False),
        ("granite", [], False),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, False),
    ],
)
def test_a_loss_in_chunks(family, overrides, chunked, tmp_path):
    fields, given = (overrides, []) if isinstance(overrides, dict) else ({}, overrides)
    assert wanted(tmp_path, family, *given, **fields).chunked_loss == chunked


def test_overrides_are_planned(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SMALL}))
    (tmp_path / "recipe.yaml").write_text(f"task: pretrain\noutput_dir: x\nsteps: 1\nmodel:\n  path: {tmp_path}\n")
    given = [
        "data.path=python",
        "optimizer.learning_rate=1e-3",
        "batch.sequence_length=64",
        "batch.global_batch_size=8",
    ]
    for rate, attention in ((0, "auto"), (0.5, "sdpa")):  # varlen has no dropout
        more = [f"model.overrides={{attention_dropout: {rate}}}"]
        assert inputs.read(str(tmp_path / "recipe.yaml"), given + more).attention == attention


# the default is the family's, and a value that the config has counts alike in all of them
@pytest.mark.parametrize(
    ("family", "outer"),
    [*((name, None) for name in sorted(PACKAGED - {"gemma3n"})), ("gemma3", True), ("gemma3", False)],
)
def test_outer_config_ties_embeddings(family, outer, tmp_path):
    config = packaged_config(family)
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("tie_word_embeddings", None)
    fields |= {} if outer is None else {"tie_word_embeddings": outer}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    published = AutoConfig.from_pretrained(tmp_path)
    assert model_shape.read(str(tmp_path))["tie_word_embeddings"] == text_config(published).tie_word_embeddings


@pytest.mark.parametrize("family", sorted(families("packed")))
def test_families_with_whole_logits(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert is_chunkable(model) == (family not in families("whole_logits"))


@pytest.mark.parametrize(
    ("strategy", "overrides", "cluster", "masked"),
    [
        ("fsdp", [], "h100x8", True),  # sdpa, while nothing is measured on a GPU
        ("fsdp", [], "cpux8", False),  # varlen
        ("fsdp", {"attention_dropout": 0.1}, "cpux8", True),
        ("fsdp", ["precision=fp32"], "cpux8", True),
        ("fsdp", ["model.attention=varlen"], "h100x8", False),
        ("fsdp_ulysses", ["model.attention=varlen"], "h100x8", False),
        ("fsdp_cp", [], "cpux8", True),  # gathered keys are computed by sdpa
    ],
)
def test_a_mask(strategy, overrides, cluster, masked, tmp_path):
    fields, given = (overrides, []) if isinstance(overrides, dict) else ({}, overrides)
    job = wanted(tmp_path, "llama", *given, **fields)
    described, problems = strategies.describe(job, read(f"configs/{strategy}.yaml"), {}, 8)
    assert not problems and strategies.job(job, described, built_in(cluster)).masked == masked


def test_compiled_layers_and_fp8_products():
    """Both together are faster than either; compiled layers keep less."""
    strategy, seconds, bytes_kept = read("configs/fsdp.yaml"), {}, {}
    for settings in ((), ("compile=regional",), ("fp8=rowwise",), ("compile=regional", "fp8=rowwise")):
        job = inputs.read("benchmarks/planner/llama_8b.json", settings)
        described, problems = strategies.describe(job, strategy, {}, 8)
        assert not problems
        planned = strategies.job(job, described, built_in("h100x8"))
        assert (planned.compile, planned.fp8_recipe) == ("compile=regional" in settings, job.fp8)
        seconds[settings], bytes_kept[settings] = step_time.breakdown(planned).total, layer_bytes(planned)
    assert min(seconds, key=lambda settings: seconds[settings]) == ("compile=regional", "fp8=rowwise")
    assert bytes_kept[("compile=regional",)] < bytes_kept[()] == bytes_kept[("fp8=rowwise",)]


@pytest.mark.parametrize(
    ("overrides", "sequences"),
    [
        ([], 1),
        (["task=dpo"], 2),
        (["task=dpo", "dpo.loss=kto"], 1),
        (["task=reward"], 2),
        (["task=classify"], 1),
        (["task=embed"], 2),
        (["task=embed", "data.num_negatives=3"], 5),
        (["task=embed", "data.negative_columns=[a, b]"], 4),
    ],
)
def test_sequences_of_a_row(overrides, sequences, tmp_path):
    """A micro-batch has so many sequences for each of its rows, and ranks share the rows of a step."""
    request = wanted(tmp_path, "llama", "batch.global_batch_size=8", "batch.sequence_length=64", *overrides)
    described, _ = strategies.describe(request, read("configs/fsdp.yaml"), {}, 4)
    job = strategies.job(request.with_memory(2, "none"), described, built_in("h100x4"))
    assert (job.micro_batch, job.grad_accum, job.tokens) == (2, 1, 2 * sequences * 64)
    assert request.tokens == 8 * sequences * 64
    chosen = search.evaluate(request, built_in("h100x8").scaled(8), [read("configs/fsdp.yaml")])[0]
    assert chosen.idle_ranks == 0
    told = plan_text.job_size(request)
    assert (f"8 rows of {sequences} x 64 tokens" if sequences > 1 else "8 rows of 64 tokens") in told
