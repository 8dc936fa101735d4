"""What a recipe may not ask of each way of distributing a run, with the reason and a way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import missing

from samecurve.config.documents import Document
from samecurve.specs.tasks import TASKS
from samecurve.strategy import validate
from samecurve.strategy.capabilities import KEYS, problems
from samecurve.strategy.launchers import Launch
from samecurve.strategy.plan import Strategy
from samecurve.strategy.resolve import describe_strategy, read_files
from samecurve.strategy.timetables import SCHEDULES
from samecurve.strategy.validate import check_parallelism
from scripts.pages.capabilities import PROOFS

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "task": "pretrain",
    "precision": "fp32",
    "adapter.dora": False,
    "adapter.target_parameters": None,
    "adapter.modules_to_save": None,
    "adapter.quantization": None,
    "fp8": "off",
    "model.kernels": "torch",
    "model.attention": "auto",
    "loss.implementation": "auto",
    "compile": "off",
    "memory.activation_checkpointing": "none",
    "memory.gradient_sync": "auto",
    "numerics.compare_replicas_every_steps": 0,
    "optimizer.name": "adamw",
    "optimizer.implementation": "fused",
    "batch.global_batch_size": 12,
    "batch.micro_batch_size": 1,
    "batch.sequence_length": 32,
    "data.group_by_length": False,
}
STRATEGIES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
RECOMPUTED = "memory.activation_checkpointing"


def strategy(name: str, world_size: int = 2, **changes: Any) -> Strategy:
    """The shipped one of this name, or "ring": that of context parallelism."""
    path = ROOT / "configs" / f"{'fsdp_cp' if name == 'ring' else name}.yaml"
    changes |= {"context_parallel": "ring"} if name == "ring" else {}
    return replace(describe_strategy(read_files(str(path)), Launch("torchrun", world_size)), **changes)


def refusals(name: str | Strategy, changes: dict[str, Any]) -> list[tuple[str, str]]:
    used, values = strategy(name) if isinstance(name, str) else name, GOOD | changes
    found = [(key, text) for key in KEYS for text in problems(values.__getitem__, used, key)]
    rules = validate._sequence, validate._micro_batches
    return [*found, *(finding for rule in rules for finding in rule(values.__getitem__, used))]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)  # a YAML names its JSON from here


@pytest.mark.parametrize("name", [*STRATEGIES, "ring"])
def test_defaults_are_allowed_everywhere(name):
    assert not refusals(name, {})
    assert not refusals(name, {"fp8": False, "compile": None})  # a bare off
    assert not refusals(name, {"compile": "auto"})


def test_one_process_takes_everything():
    asked = {"task": "mlm", "precision": "fp16", "compile": "full", "fp8": "rowwise", "optimizer.name": "muon"}
    assert not refusals("single", asked | {"adapter.quantization": "4bit", "memory.gradient_sync": "last_micro_batch"})


OF_TOKENS = ("token_classify", "process_reward")
REFUSED_TASKS = {
    "tp": {"mlm", *OF_TOKENS},
    "fsdp_ulysses": {"mlm", *OF_TOKENS},
    "pipeline_1f1b": {"mlm", *OF_TOKENS},
    "pp_fsdp_tp": {"mlm", "distill", "reward", "classify", "embed", *OF_TOKENS},
    "pipeline": {"mlm", "distill", "reward", "classify", "embed", *OF_TOKENS},
    "fsdp_ep": {*OF_TOKENS},
    "zero3": set(),
}


@pytest.mark.parametrize("name", REFUSED_TASKS)
def test_tasks(name):
    assert {task for task in TASKS if refusals(name, {"task": task})} == REFUSED_TASKS[name]


# by strategy, the optimizers that it takes
OPTIMIZERS = {
    "fsdp": {"adamw", "lion", "sgd", "adafactor", "muon", "adamw_bf16", "adamw_8bit"},
    "fsdp_cp": {"adamw", "lion", "sgd", "adafactor", "muon", "adamw_bf16", "adamw_8bit"},
    **dict.fromkeys(("tp", "fsdp_ep", "pipeline_1f1b", "pipeline", "zero3"), {"adamw", "lion", "sgd"}),
    "fsdp_offload": {"adamw", "lion", "sgd", "adamw_bf16"},
    "zero2_offload": {"adamw"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    assert {each for each in OPTIMIZERS["fsdp"] if not refusals(name, {"optimizer.name": each})} == OPTIMIZERS[name]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("tp", {"compile": "full"}, ("found full", "use off, auto or regional, or configs/fsdp.yaml")),
        ("tp", {"adapter.dora": True}, ("found true, but DoRA's norms", "use false, or configs/fsdp.yaml")),
        ("pp_fsdp_tp", {"task": "reward"}, ("found reward", "whole rows", "parallelism_config_tp_size to 1")),
        ("pp_fsdp_tp", {"task": "distill"}, ("found distill", "the teacher's whole logits")),
        ("pp_fsdp_tp", {"loss.implementation": "full"}, ("found full", "whole logits", "auto or chunked")),
        ("pipeline_1f1b", {"loss.implementation": "liger"}, ("found liger", "compared", "auto, chunked or full")),
        ("pipeline_1f1b", {"loss.implementation": "chunked", "task": "distill"}, ("teacher's", "auto or full")),
        ("pipeline_1f1b", {"compile": "full"}, ("whole model", "use off or regional")),
        ("pipeline", {"compile": "full"}, ("found full", "regional")),
        ("fsdp", {"compile": "full"}, ("found full", "regional")),
        ("pipeline_zbv", {"compile": "regional"}, ("wrong gradients", "use off,")),
        ("pipeline_zbv", {"compile": "full"}, ("wrong gradients", "use off,")),
        ("pipeline_zbv", {RECOMPUTED: "selective"}, ("recomputed in part", "use full or none")),
        ("pipeline_gpipe", {"numerics.compare_replicas_every_steps": 5}, ("found 5, but", "use 0")),
        ("fsdp_cp", {"model.attention": "varlen"}, ("whole rows", "fsdp_ulysses.yaml")),
        ("ring", {"model.attention": "sdpa"}, ("parallelism_config_cp_comm_strategy", "use auto")),
        ("fsdp_ulysses", {"model.attention": "eager"}, ("exchange", "use auto, sdpa or varlen")),
        ("zero3", {"fp8": "rowwise"}, ("found rowwise", "configs/fsdp.yaml")),
        ("zero2", {"memory.gradient_sync": "last_micro_batch"}, ("ZeRO-2 reduces", "use auto")),
        ("zero2_offload", {"optimizer.implementation": "foreach"}, ("CPU Adam", "remove it")),
        ("tp", {"adapter.quantization": "4bit"}, ("found 4bit", "configs/zero3.yaml, or null")),
        ("zero3_nvme", {"adapter.quantization": "8bit"}, ("found 8bit", "model's own dtype")),
    ],
)
def test_refusal_has_reason_and_way_out(name, changes, words):
    ((key, text),) = refusals(name, changes)
    assert key in changes and not missing(text, words)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("pipeline_")])
def test_schedules_that_cut_backward_passes(name):
    folded = SCHEDULES[strategy(name).schedule].folded
    assert bool(refusals(name, {"compile": "regional"})) == folded
    kinds = ("none", "full", "every_n_layers", "selective", "offload")
    refused = {kind for kind in kinds if refusals(name, {RECOMPUTED: kind})}
    assert refused == ({"selective", "offload"} if folded else {"offload"})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fsdp_ulysses", {"model.attention": "varlen"}),
        ("pipeline_1f1b", {"loss.implementation": "full"}),
        ("fsdp", {"memory.gradient_sync": "last_micro_batch"}),
        ("ddp", {"memory.gradient_sync": "last_micro_batch"}),
        ("zero3", {"compile": "off"}),
        ("pipeline", {"compile": "off"}),
    ],
)
def test_allowed(name, changes):
    assert not refusals(name, changes)


def sequence_parallel(size: int) -> Strategy:
    named = strategy("tp", size, tp_sequence_parallel=True, path=Path("tp.yaml"))
    return replace(named, dims=replace(named.dims, tp=size, dp_replicate=1))


def test_a_sequence_has_to_divide():
    assert not refusals(sequence_parallel(2), {"batch.sequence_length": 30})
    assert not refusals(replace(sequence_parallel(4), tp_sequence_parallel=False), {"batch.sequence_length": 30})
    ((key, text),) = refusals(sequence_parallel(4), {"batch.sequence_length": 30})
    assert key == "batch.sequence_length" and text.startswith("found 30, which cannot be divided over 4 ranks (tp.yaml")


def test_rows_grouped_by_length_have_to_divide():
    """Their widths are multiples of 128 (data.datasets.base), whatever the sequence length is."""
    grouped = {"data.group_by_length": True, "batch.sequence_length": 768}
    assert not refusals(sequence_parallel(4), grouped)
    assert not refusals(replace(sequence_parallel(3), tp_sequence_parallel=False), grouped)
    ((key, text),) = refusals(sequence_parallel(3), grouped)
    assert key == "data.group_by_length" and "multiples of 128 tokens, which cannot be divided over 3 ranks" in text


@pytest.mark.parametrize(("kind", "size", "wrong"), [("FSDP", 2, 0), ("FSDP", None, 1), ("MULTI_GPU", 1, 1)])
def test_only_tensor_parallelism_cuts_sequences(kind, size, wrong):
    block = {"parallelism_config_tp_sequence_parallel": True}
    block |= {} if size is None else {"parallelism_config_tp_size": size}
    document = Document("my.yaml", {"distributed_type": kind, "parallelism_config": block})
    check_parallelism(document)
    assert len(document.problems) == wrong


def pipelined(schedule: str, ranks: int, readers: int = 1) -> Strategy:
    named = strategy("pipeline_1f1b", schedule=schedule)
    return replace(named, dims=replace(named.dims, pp=ranks, dp_replicate=readers))


@pytest.mark.parametrize(
    ("name", "ranks", "readers", "rows", "size", "words"),
    [
        ("1F1B", 4, 1, 12, 6, ("2 micro-batches", "4 stages", "1 or 2 or 3")),
        ("1F1B", 4, 2, 12, 3, ("2 micro-batches of 6 rows", "use 1")),
        ("DualPipeV", 4, 1, 12, 2, ("6 micro-batches", "8 stages", "use 1")),
        ("DualPipeV", 7, 1, 12, "auto", ("found auto", "14 stages", "raise batch.global_batch_size")),
        ("Interleaved1F1B", 2, 1, 10, 2, ("5 micro-batches", "a multiple of 2", "use 1 or 3")),
        ("1F1B", 4, 1, 12, 3, ()),
        ("1F1B", 4, 1, 12, "auto", ()),
        ("Interleaved1F1B", 2, 1, 5, "auto", ()),  # a rehearsal finds a size that fits
    ],
)
def test_wrong_micro_batches_are_refused_with_sizes_that_work(name, ranks, readers, rows, size, words):
    batch = {"batch.global_batch_size": rows, "batch.micro_batch_size": size}
    found = refusals(pipelined(name, ranks, readers), batch)
    assert [key for key, _ in found] == ["batch.micro_batch_size"] * bool(words)
    assert not words or not missing(found[0][1], words)


def test_named_proofs_exist():
    for key, proofs in PROOFS.items():
        for test in " ".join(proofs).split():
            assert (ROOT / "tests" / "distributed" / f"{test}.py").is_file(), (key, test)
