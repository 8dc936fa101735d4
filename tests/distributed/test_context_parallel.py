"""Context parallelism in the cases that test_equal_curves.py and test_resume.py do not have, against one process."""

from __future__ import annotations

import json

import pytest
import yaml
from harness import long
from test_equal_curves import CONTEXT
from test_tensor_parallel import SIZES, assert_equal, short_run

# with a window, norms of heads, one key head for two ranks, capped positions, packed weights
CONFIGS = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8, "num_key_value_heads": 1},
    "gemma3_text": {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 9, "num_hidden_layers": 6},
    "phi3": {"pad_token_id": 0},
}
WAYS = {**CONTEXT, "ring": "ring"}  # the last one is fsdp_cp with another cp_comm_strategy
OPTIONS_OF = {**WAYS, "fsdp_tp_cp": "allgather"}
PACKED = "data.packing=true"
ONCE = "memory.gradient_sync=last_micro_batch"
COMPILED = "compile=regional"
# a length that the ranks do not divide, at the head all at once and in layers that are computed twice
UNDIVIDED = (
    PACKED,
    "batch.sequence_length=33",
    "loss.implementation=full",
    "memory.activation_checkpointing=full",
)


def context_run(workspace, way: str, *arguments):
    run = short_run(workspace, workspace.ring if way == "ring" else way, *arguments)
    assert run.facts["context_parallel"] == OPTIONS_OF[way]
    return run


def config_of(family: str, **changes) -> str:
    return f"model.config={json.dumps({'model_type': family, **SIZES, **CONFIGS[family], **changes})}"


@pytest.mark.parametrize(
    ("family", "way", "world"),
    [
        ("gemma3_text", "ring", 2),
        *long(("gemma3_text", "fsdp_ulysses", 2)),
        *long(*((family, way, 2) for family in CONFIGS if family != "gemma3_text" for way in ("fsdp_ulysses", "ring"))),
        *long(*((family, "fsdp_cp", 2) for family in CONFIGS)),
        *long(*((family, way, 4) for family in CONFIGS for way in WAYS)),
    ],
)
def test_families_on_packed_rows(family, way, world, workspace):
    """Two micro-batches of documents of uneven length, which end anywhere in a rank's part."""
    expected = short_run(workspace, None, 1, 8, config_of(family), PACKED)
    run = context_run(workspace, way, world, 4 // (world // 2), config_of(family), PACKED)
    assert [run.facts[key] for key in ("context_parallel_size", "gradient_accumulation_steps")] == [2, 2]
    assert f"2 context-parallel ({WAYS[way]})" in run.output
    assert_equal(run, expected)


# the keys that change the size of fsdp_ulysses or fsdp_cp
FOUR = {
    "ulysses": ("fsdp_ulysses", {"sp_size": 4}),
    "allgather": ("fsdp_cp", {"cp_size": 4}),
    "ring": ("fsdp_cp", {"cp_size": 4, "cp_comm_strategy": "alltoall"}),
}


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("exchange", FOUR)
def test_rows_in_four_parts(exchange, family, workspace):
    """Two key heads, or one, for four ranks; a window of 9 tokens is longer than the 8 of a rank's part."""
    name, keys = FOUR[exchange]
    expected = short_run(workspace, None, 1, 8, config_of(family), PACKED)
    run = short_run(workspace, workspace.parallel(name, **keys), 4, 4, config_of(family), PACKED)
    facts = run.facts
    assert (facts["context_parallel"], facts["context_parallel_size"], facts["data_parallel_size"]) == (exchange, 4, 1)
    assert (facts["gradient_accumulation_steps"], facts["sharded"]) == (2, True)
    assert f"4 context-parallel ({exchange})" in run.output
    assert_equal(run, expected)
    found, wanted = run.metrics[-1], expected.metrics[-1]
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
def test_layers_and_rows_are_cut(way, family, workspace):
    """Two parts of every layer, two of every row, and shards over the latter."""
    config = config_of(family, num_key_value_heads=2)
    run = cut_twice(workspace, way, config, PACKED)
    facts = run.facts
    assert (facts["tensor_parallel_size"], facts["context_parallel_size"]) == (2, 2)
    assert (facts["context_parallel"], facts["data_parallel_size"], facts["sharded"]) == (WAYS[way], 1, True)
    assert facts["gradient_accumulation_steps"] == 2
    assert_equal(run, short_run(workspace, None, 1, 8, config, PACKED))


@pytest.mark.parametrize("family", long("llama", "phi3"))
def test_each_rank_drops_its_heads_of_whole_rows(family, workspace):
    """Tensor parallelism gives a rank half of the heads, and Ulysses half of those."""
    config = config_of(family, num_key_value_heads=2, attention_dropout=0.2)
    run = cut_twice(workspace, "fsdp_ulysses", config, PACKED, "memory.activation_checkpointing=full")
    assert run.facts["dropout"]["attention_dropout"] == 0.2
    assert_equal(run, short_run(workspace, None, 1, 8, config, PACKED))


def cut_twice(workspace, way: str, *overrides: str):
    word, key = ("ulysses", "sp_size") if way == "fsdp_ulysses" else ("cp", "cp_size")
    path = workspace.folder / "cut_twice" / way / f"fsdp_tp_{word}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_load(workspace.strategy("fsdp_tp_cp").read_text())
    block = {"parallelism_config_tp_size": 2, f"parallelism_config_{key}": 2}
    block |= {"parallelism_config_cp_comm_strategy": "alltoall"} if way == "ring" else {}
    path.write_text(yaml.safe_dump(content | {"parallelism_config": block}))
    return short_run(workspace, path, 4, 4, *overrides)


def test_the_families_are_all_that_are_allowed():
    from samecurve.specs.model_families import families

    assert CONFIGS.keys() == families("context_parallel")


@pytest.mark.parametrize(
    ("way", "overrides"),
    [
        *long(
            *((way, UNDIVIDED) for way in ("fsdp_cp", "fsdp_ulysses", "ring")),
            ("fsdp_ulysses", (PACKED, "model.attention=varlen")),
            *((way, (PACKED, "memory.activation_checkpointing=selective", ONCE)) for way in WAYS),
            ("fsdp_ulysses", (PACKED, "model.attention=varlen", "batch.sequence_length=33")),
            ("fsdp_ulysses", (PACKED, config_of("llama", attention_dropout=0.2))),
            *((way, (config_of("phi3", resid_pdrop=0.2, embd_pdrop=0.1),)) for way in OPTIONS_OF),
            ("fsdp_tp_cp", UNDIVIDED),
            *((way, (PACKED, COMPILED)) for way in OPTIONS_OF),
            *((way, (PACKED, COMPILED, "memory.activation_checkpointing=full")) for way in ("fsdp_cp", "fsdp_tp_cp")),
            *((way, ("data.group_by_length=true", "batch.sequence_length=50")) for way in WAYS),
        ),
    ],
)
def test_options(way, overrides, workspace):
    expected = short_run(workspace, None, 1, 8, *(each for each in overrides if each not in (ONCE, COMPILED)))
    run = context_run(workspace, way, 4 if way == "fsdp_tp_cp" else 2, 4, *overrides)
    assert_equal(run, expected)
    assert ("recompilations" in run.metrics[0]) == (COMPILED in overrides)
    for key in ("eval_loss", "eval_tokens"):
        assert run.metrics[-1][key] == pytest.approx(expected.metrics[-1][key], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "config", "words"),
    [
        ("fsdp_ulysses", {"num_attention_heads": 3, "hidden_size": 24, "num_key_value_heads": 3}, ("sp_size", "is 3")),
        *long(
            (
                "fsdp_cp",
                {"attention_dropout": 0.1},
                ("cp_size: found 2", "attention_dropout 0.1", "set it to 0"),
            ),
            ("fsdp_cp", {"model_type": "gpt_neox", "num_key_value_heads": None}, ("gpt_neox has not been tested",)),
            ("fsdp_ulysses", {"model_type": "gemma2", "head_dim": 8}, ("gemma2 has not been tested", "llama")),
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(strategy, config, words, workspace):
    fields = {"model_type": "llama", **SIZES, **config}
    fields = {key: value for key, value in fields.items() if value is not None}
    run = workspace.run(strategy, 2, "steps=6", "batch.micro_batch_size=8", f"model.config={json.dumps(fields)}")
    assert run.returncode != 0 and "ConfigurationError" in run.output
    for word in (*words, f"configs/{strategy}.yaml", "configs/fsdp.yaml"):
        assert word in run.output
