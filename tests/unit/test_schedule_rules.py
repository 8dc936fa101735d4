"""Which micro-batches a pipeline schedule takes, by PyTorch's own schedules, and where its stages are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from samecurve.strategy.timetables import SCHEDULES, micro_batch_rule


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
