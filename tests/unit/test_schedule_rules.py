"""Which micro-batches a pipeline schedule takes, by PyTorch's own schedules, and what a recipe may not ask of one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from report_cases import missing

from samecurve.specs.tasks import TASKS
from samecurve.strategy.pipeline_schedules import SCHEDULES, micro_batch_rule
from samecurve.strategy.validate_schedule import RULES

GOOD = {
    "task": "pretrain",
    "precision": "fp32",
    "fp8": "off",
    "model.kernels": "torch",
    "loss.implementation": "auto",
    "compile": "off",
    "memory.activation_checkpointing": "none",
    "memory.gradient_sync": "auto",
    "numerics.compare_replicas_every_steps": 0,
    "optimizer.name": "adamw",
    "batch.global_batch_size": 12,
    "batch.micro_batch_size": 1,
}


def findings(
    schedule: str = "1F1B",
    ranks: int = 2,
    family: str = "schedule",
    readers: int = 1,
    tensor_size: int = 1,
    **changes,
) -> list[tuple[str, str]]:
    strategy = SimpleNamespace(
        family=family,
        pipeline_schedule=schedule,
        pipeline_stages=ranks,
        data_parallel_size=readers,
        tensor_parallel_size=tensor_size,
    )
    return [finding for rule in RULES for finding in rule((GOOD | changes).__getitem__, strategy)]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_good_recipes_are_allowed_and_other_strategies_not_judged(name):
    assert not findings(name)
    assert not findings(name, family="ddp", task="embed", compile="full", precision="fp16")


@pytest.mark.parametrize("task", sorted(TASKS))
def test_tasks(task):
    assert [key for key, _ in findings(task=task)] == (["task"] if task == "mlm" else [])


@pytest.mark.parametrize(("task", "why"), [("reward", "whole rows"), ("distill", "the teacher's whole logits")])
def test_stages_that_are_cut_take_losses_of_single_tokens(task, why):
    assert not findings(tensor_size=2)
    ((key, text),) = findings(tensor_size=2, task=task)
    assert key == "task" and f"found {task}" in text and why in text and "parallelism_config_tp_size to 1" in text


@pytest.mark.parametrize(
    ("kind", "task", "size", "words"),
    [
        ("liger", "pretrain", 1, ("found liger", "compared", "auto or chunked or full")),
        ("full", "pretrain", 2, ("found full", "whole logits", "auto or chunked")),
        ("chunked", "distill", 1, ("found chunked", "the teacher's whole logits", "auto or full")),
        ("chunked", "pretrain", 1, ()),
        ("full", "pretrain", 1, ()),
    ],
)
def test_losses(kind, task, size, words):
    found = findings(tensor_size=size, task=task, **{"loss.implementation": kind})
    assert [key for key, _ in found] == ["loss.implementation"] * bool(words)
    assert not words or not missing(found[0][1], words)


@pytest.mark.parametrize(
    ("name", "kind", "word", "fix"),
    [
        ("ZBVZeroBubble", "regional", "wrong gradients", "use off,"),
        ("1F1B", "full", "whole model", "use off or regional"),
    ],
)
def test_compile_is_refused_with_the_reason(name, kind, word, fix):
    ((key, text),) = findings(name, compile=kind)
    assert key == "compile" and word in text and fix in text


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_layers_may_be_compiled_unless_their_backward_pass_is_cut(name):
    assert bool(findings(name, compile="regional")) == SCHEDULES[name].folded


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_layers_that_are_recomputed_in_part_need_an_uncut_backward_pass(name):
    kinds = ("none", "full", "every_n_layers", "selective", "offload")
    refused = [kind for kind in kinds if findings(name, **{"memory.activation_checkpointing": kind})]
    assert refused == (["selective", "offload"] if SCHEDULES[name].folded else ["offload"])


@pytest.mark.parametrize(
    ("name", "ranks", "rows", "size", "words"),
    [
        ("1F1B", 4, 12, 6, ("2 micro-batches", "4 stages", "1 or 2 or 3")),
        ("DualPipeV", 4, 12, 2, ("6 micro-batches", "8 stages", "use 1")),
        ("Interleaved1F1B", 2, 10, 2, ("5 micro-batches", "a multiple of 2", "use 1 or 3")),
    ],
)
def test_wrong_micro_batches_are_refused_with_sizes_that_work(name, ranks, rows, size, words):
    batch = {"batch.global_batch_size": rows, "batch.micro_batch_size": size}
    ((key, text),) = findings(name, ranks, **batch)
    assert key == "batch.micro_batch_size"
    for word in words:
        assert word in text


def test_automatic_micro_batches_need_a_size_that_the_schedule_takes():
    automatic = {"batch.micro_batch_size": "auto"}
    assert not findings("1F1B", 4, **automatic)
    assert findings("Interleaved1F1B", 2, **{"batch.global_batch_size": 5, "batch.micro_batch_size": 1})
    assert not findings("Interleaved1F1B", 2, **automatic, **{"batch.global_batch_size": 5})
    ((key, text),) = findings("DualPipeV", 7, **automatic)
    assert (
        key == "batch.micro_batch_size"
        and "found auto" in text
        and "14 stages" in text
        and "raise batch.global_batch_size" in text
    )


def test_comparing_replicas_is_refused():
    ((key, text),) = findings(**{"numerics.compare_replicas_every_steps": 5})
    assert key == "numerics.compare_replicas_every_steps"
    assert text.startswith("found 5, but") and "use 0" in text


def test_pipelines_that_read_different_rows_share_the_batch():
    batch = {"batch.global_batch_size": 12, "batch.micro_batch_size": 3}
    assert not findings("1F1B", 4, **batch)
    ((_, text),) = findings("1F1B", 4, readers=2, **batch)
    assert "2 micro-batches of 6 rows" in text and "use 1" in text


def torch_refuses(name: str, ranks: int, num_micro_batches: int) -> bool:
    """Ask PyTorch's schedule of rank 0; a stand-in for its stages needs no processes."""
    from torch.distributed.pipelining import schedules

    kind = schedules.get_schedule_class(name)
    stages = [SimpleNamespace(
        stage_index=stage, num_stages=SCHEDULES[name].num_stages(ranks), group_size=ranks, group_rank=0, group=None,
        is_first=stage == 0, is_last=False, submod=None, has_backward=True, stage_index_to_group_rank={},
    ) for stage in SCHEDULES[name].stages(0, ranks)]  # fmt: skip
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    try:
        kind(stages[0] if single else stages, num_micro_batches)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_rule_is_that_of_torch(name):
    for ranks in (2, 3, 4):
        for count in range(1, 14):
            assert bool(micro_batch_rule(name, count, ranks)) == torch_refuses(name, ranks, count), (ranks, count)


def test_places_of_stages():
    assert [SCHEDULES["1F1B"].stages(rank, 3) for rank in range(3)] == [[0], [1], [2]]
    assert [SCHEDULES["Interleaved1F1B"].stages(rank, 2) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [SCHEDULES["ZBVZeroBubble"].stages(rank, 3) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
