"""Pipeline schedules without torch: the order is PyTorch's own, and the waiting is that of the papers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from samecurve.planner import inputs, remedies, search, strategies
from samecurve.planner.cluster import built_in
from samecurve.planner.hardware import profile
from samecurve.planner.ledger import ledger
from samecurve.planner.stages import ENOUGH, STEADY, in_flight, stages
from samecurve.planner.step_time import breakdown, stage_time
from samecurve.planner.strategies import read
from samecurve.strategy.timetables import SCHEDULES, idle_slots, micro_batch_rule, micro_batches_kept, order

SIZES = [(ranks, count) for ranks in (1, 2, 3, 4, 8) for count in (1, 2, 3, 4, 6, 8, 12, 16, 19, 32)]


class Stage(SimpleNamespace):
    """Stands in for a stage of PyTorch's, without processes, and notes what a schedule asks it to compute."""

    def __init__(self, name: str, index: int, ranks: int):
        count = SCHEDULES[name].num_stages(ranks)
        super().__init__(
            stage_index=index, num_stages=count, group_size=ranks, group_rank=0, group=None, is_first=index == 0,
            is_last=False, submod=None, has_backward=True, stage_index_to_group_rank={}, noted=[],
        )  # fmt: skip
        self.get_fwd_recv_ops = self.get_fwd_send_ops = self.get_bwd_recv_ops = self.get_bwd_send_ops = lambda _: []
        self.forward_one_chunk = lambda number, *_, **__: self.noted.append([f"{index}F{number}"])
        self.backward_one_chunk = lambda number, **_: self.noted.append([f"{index}B{number}"])
        self.perform_reduce_grad = lambda _: None


def torch_order(name: str, ranks: int, count: int) -> list[list[list[str]]]:
    """Ask PyTorch's schedule: those of several stages per rank for their tables, the others for what they run.

    The table that Schedule1F1B prints is not what it runs: in torch 2.13 its last stage leaves out micro-batch 0.
    """
    from torch.distributed.pipelining import schedules

    kind = schedules.get_schedule_class(name)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return [noted_by(kind, Stage(name, rank, ranks), count) for rank in range(ranks)]
    table = kind([Stage(name, stage, ranks) for stage in SCHEDULES[name].stages(0, ranks)], count).pipeline_order
    entries = [[each.sub_actions or (each,) for each in table[rank] if each is not None] for rank in range(ranks)]
    return [[[str(part) for part in each] for each in row] for row in entries]


def noted_by(kind, stage: Stage, count: int) -> list[list[str]]:
    schedule = kind(stage, count)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return stage.noted


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_order_is_that_of_torch(name):
    compared = 0
    for ranks, count in SIZES:
        if ranks > 1 and not micro_batch_rule(name, count, ranks):
            own = [order(name, rank, ranks, count) for rank in range(ranks)]
            shown = [[[f"{part.stage}{part.kind}{part.micro_batch}" for part in each] for each in row] for row in own]
            assert shown == torch_order(name, ranks, count), (ranks, count)
            compared += 1
    assert compared >= 14


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_everything_is_computed_once(name):
    for ranks, count in SIZES:
        if micro_batch_rule(name, count, ranks):
            continue
        for rank in range(ranks):
            passed = [each for entry in order(name, rank, ranks, count) for each in entry]
            for stage in SCHEDULES[name].stages(rank, ranks):
                for kinds in ("F", "BI", "BW"):
                    numbers = [each.micro_batch for each in passed if each.stage == stage and each.kind in kinds]
                    assert sorted(numbers) == list(range(count)), (ranks, count, stage, kinds)


COSTS = {"F": 1, "I": 1, "W": 1, "B": 2}


def walk(name: str, ranks: int, count: int) -> tuple[int, list[float]]:
    """Let all ranks go through their orders. Returns units of time, and each rank's idle share."""
    orders = [order(name, rank, ranks, count) for rank in range(ranks)]
    last, done = SCHEDULES[name].num_stages(ranks) - 1, {}  # by stage, whether forward, micro-batch: its end
    times, places = [0] * ranks, [0] * ranks
    while any(place < len(entries) for place, entries in zip(places, orders, strict=True)):
        before = list(places)
        for rank, entries in enumerate(orders):
            while places[rank] < len(entries):
                entry = entries[places[rank]]
                inputs = [needed(work, last) for work in entry if needed(work, last)]
                if any(source not in done for source in inputs):
                    break
                start = max([times[rank], *(done[source] for source in inputs)])
                times[rank] = start + sum(COSTS[work.kind] for work in entry)
                done |= {
                    (work.stage, work.kind == "F", work.micro_batch): times[rank] for work in entry if work.kind != "W"
                }
                places[rank] += 1
        assert places != before, name  # else the order never ends
    busy = [sum(COSTS[work.kind] for entry in entries for work in entry) for entries in orders]
    return max(times), [1 - units / max(times) for units in busy]


def needed(work, last: int) -> tuple[int, bool, int] | None:
    """Name the output that a pass takes in; None: the first stage's rows, and W, which follows its rank's own I."""
    if work.kind == "W" or (work.kind == "F" and not work.stage):
        return None
    if work.kind == "F" or work.stage == last:
        return work.stage - (work.kind == "F"), True, work.micro_batch
    return work.stage + 1, False, work.micro_batch


def test_ranks_wait_as_long_as_the_papers_say():
    """In units of F, I or W of one stage, 4 ranks and 8 micro-batches, worked out by hand.

    1F1B and GPipe wait 3 (p - 1); so does an interleaved rank, whose 8 micro-batches take 2 x 3 x 8 units
    (arXiv:2104.04473, section 2.2); ZB-V p - 1 (arXiv:2401.10241, section 6); PyTorch's DualPipeV 2 (p - 1), as it does
    not compute a forward and a backward pass at once.
    """
    waits = {"GPipe": 9, "1F1B": 9, "Interleaved1F1B": 9, "ZBVZeroBubble": 3, "DualPipeV": 6}
    lengths = {name: walk(name, 4, 8)[0] for name in SCHEDULES}
    assert lengths == {name: 24 * SCHEDULES[name].stages_per_rank + wait for name, wait in waits.items()}
    assert walk("ZBVZeroBubble", 4, 8)[1] == [pytest.approx(3 / 51)] * 4


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_formula_is_the_walk(name):
    for ranks, count in SIZES:
        if not micro_batch_rule(name, count, ranks):
            idle = idle_slots(name, ranks, count, SCHEDULES[name].stages_per_rank)
            assert walk(name, ranks, count)[1] == [pytest.approx(idle / (count + idle))] * ranks, (ranks, count)


def test_micro_batches_kept():
    """GPipe keeps all, 1F1B p - r, and its interleaved form 1 + (p - 1) / (p v) times as many on the first rank.

    ZB-V has the peak of 1F1B's first rank everywhere; DualPipeV keeps half a micro-batch more.
    """
    kept = {name: [micro_batches_kept(name, rank, 4, 16)[0] for rank in range(4)] for name in SCHEDULES}
    assert kept == {
        "GPipe": [16] * 4,
        "1F1B": [4, 3, 2, 1],
        "Interleaved1F1B": [5.5, 4.5, 3.5, 2.5],
        "ZBVZeroBubble": [4] * 4,
        "DualPipeV": [4.5] * 4,
    }


@pytest.mark.parametrize("name", STEADY)
def test_what_ranks_keep_does_not_grow_with_further_micro_batches(name):
    for ranks, count, share in product((2, 3, 4, 7, 8), (1, 2, 5), (0.0, 0.4, 3.0)):
        few, many = ENOUGH * ranks, ENOUGH * ranks + count
        for rank in range(ranks):
            kept = [micro_batches_kept(name, rank, ranks, each, share) for each in (few, many)]
            assert kept[0] == kept[1], (ranks, rank, count, share)


def test_a_job_is_forecast_by_its_own_schedule():
    """The planner reads size and schedule from the files; what ranks wait and keep follows from both."""
    folder = "configs/pipeline_"
    wanted = inputs.read("recipes/quickstart.yaml", ["batch.global_batch_size=16", "batch.micro_batch_size=2"])
    found = {}
    for name in ("1f1b", "zbv"):
        strategy, problems = strategies.describe(wanted, read(f"{folder}{name}.yaml"), {}, 2)
        assert not problems
        job = strategies.job(wanted, strategy, built_in("h100x2"))
        time = breakdown(job)
        times = [stage_time(job, each, profile(job.stack)) for each in stages(job, by_cost=False)]
        busy = min(each.compute + each.pipeline_sends for each in times)  # of the rank that the slower one waits for
        kept = [(each.name, each.layers, in_flight(job, each)[0]) for each in stages(job, by_cost=False)]
        found[name] = job.strategy.schedule, time.bubble / busy, kept
    assert found["1f1b"] == ("1F1B", pytest.approx(1 / 8), [("first", 2, 2), ("last", 2, 1)])
    assert found["zbv"] == ("ZBVZeroBubble", pytest.approx(1 / 48), [("first and last", 2, 2), ("middle", 2, 2)])


KINDS = ("none", "full", "selective")


def test_a_search_keeps_to_what_a_schedule_takes():
    """On 2 x 2 ranks 16 rows are 8 per pipeline; 1F1B takes at least 2; a cut backward pass takes no selection."""
    wanted = inputs.read("recipes/quickstart.yaml", ["batch.global_batch_size=16", "batch.micro_batch_size=2"])
    template = read("configs/pipeline_1f1b.yaml")
    strategy, problems = strategies.describe(wanted, template, {"pp": 2}, 4)
    assert not problems and (strategy.dims.pp, strategy.dims.dp_replicate) == (2, 2)
    taken = [size for size in (1, 2, 4, 8) if strategies.takes(wanted.with_memory(size, "none"), strategy)]
    assert taken == [1, 2, 4]
    assert strategies.takes(wanted.with_memory(2, "full"), strategy)
    zero_bubble = read("configs/pipeline_zbv.yaml")
    cut, _ = strategies.describe(wanted, zero_bubble, {"pp": 2}, 4)
    kinds = [kind for kind in KINDS if strategies.takes(wanted.with_memory(2, kind), cut)]
    assert kinds == ["none", "full"]
    recomputing = replace(wanted.with_memory(2, "selective"), fixed=frozenset(("checkpointing",)))
    assert "not this recomputation" in search.sized(recomputing, built_in("h100x4"), zero_bubble, {"pp": 2}).reason
    assert list(remedies._least_memory(wanted, built_in("h100x4"), template, template.own_sizes))
    assert template.own_sizes == {"pp": 2}
    assert {each["pp"] for each in search.sizes(read("configs/pipeline_zbv.yaml"), wanted, built_in("h100x8"))} == {2}


def test_messages_of_a_step():
    """Hidden states of 16 rows, forward and back: an interleaved model crosses two ranks three times, a V twice."""
    wanted = inputs.read("recipes/quickstart.yaml", ["batch.global_batch_size=16", "batch.micro_batch_size=2"])
    crossings = {"1f1b": 1, "interleaved": 3, "zbv": 2}
    for name, count in crossings.items():
        strategy, _ = strategies.describe(wanted, read(f"configs/pipeline_{name}.yaml"), {}, 2)
        job = strategies.job(wanted, strategy, built_in("h100x2"))
        for stage in stages(job, by_cost=False):
            found = {each.collective: each.num_bytes for each in ledger(job, stage) if each.content[:6] == "hidden"}
            expected = count * 4 * 16 * job.seq * job.shape.hidden
            assert found == {"send": expected, "recv": expected}, (name, stage.name)
