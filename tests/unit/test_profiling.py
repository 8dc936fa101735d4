"""Where the time goes: the arithmetic by hand, and the table on what PyTorch really records."""

from __future__ import annotations

import errno
import json
import re
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import record_function
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.config.schema import Profile
from samecurve.data.batches import DATA_WAIT
from samecurve.engines.memory_usage import memory_usage
from samecurve.interfaces.engine import MemoryUsage
from samecurve.losses.chunked_cross_entropy import TokenSums, chunked_sums
from samecurve.losses.cross_entropy import LOSS, token_loss_sum
from samecurve.metrics.profiling import recorder
from samecurve.metrics.profiling.dimensions import NOTES, PEER, UNKNOWN, attribute, dimension
from samecurve.metrics.profiling.summary import memory, render_summary, summary_lines, summary_values
from samecurve.metrics.profiling.trace import KINDS, Breakdown, breakdown, listed, read_trace
from samecurve.strategy.parallel_dims import ParallelDims

MS = 1000.0  # in a trace's microseconds


def event(name, start, duration, thread=1, category="cpu_op", **arguments):
    """start, duration: milliseconds."""
    times = {"ts": start * MS, "dur": duration * MS}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": thread, "args": arguments, **times}


def annotation(name, start, duration, thread=1):
    return event(name, start, duration, thread, "user_annotation")


def milliseconds(found):
    return {kind: round(1000 * seconds, 6) for kind, seconds in found.seconds.items() if seconds}


# One step of 100 ms. The rows come after 10. A linear layer takes 20, of which 5 are a copy; its view is part of it.
# Attention takes 10, whatever is in it. A collective runs from 40 to 70: under it, 10 ms of a norm are computed.
# FSDP's range around it is no work, and neither is autograd's node from 70 to 90, which only calls: 5 ms of work are in
# it. The update takes 8 ms, mostly outside of operators.
ONE_STEP = [
    annotation("ProfilerStep#7", 0, 100),
    annotation(DATA_WAIT, 0, 10),
    event("aten::zeros", 1, 2),
    event("aten::linear", 10, 20),
    event("aten::t", 11, 1),
    event("aten::copy_", 15, 5),
    event("aten::scaled_dot_product_attention", 30, 10),
    event("aten::mm", 32, 4),
    annotation("FSDP::post_backward_reduce", 40, 30),
    annotation("gloo:all_reduce", 40, 30, thread=2),
    annotation("gloo:all_reduce", 45, 25, thread=2),
    event("aten::rsqrt", 50, 10),
    event("autograd::engine::evaluate_function: MulBackward0", 70, 20),
    event("aten::mul", 80, 5),
    annotation("Optimizer.step#AdamW.step", 90, 8),
    event("aten::mm", 91, 2),
    event("aten::mul", 0, 100, thread=3),
]


def test_a_step_on_a_cpu_by_hand():
    found = breakdown(ONE_STEP)
    assert (found.steps, found.on_device) == ((7,), False)
    assert milliseconds(found) == {
        "data_wait": 10,
        "matmul": 15,
        "copies": 5,
        "attention": 10,
        "communication": 20,
        "elementwise": 15,
        "optimizer": 8,
        "idle": 17,
    }
    assert found.communication_seconds == pytest.approx(0.030)
    assert found.total_seconds == pytest.approx(0.100)
    top = found.operators[0]
    assert (top.name, top.kind, top.calls, round(top.seconds, 9)) == ("aten::linear", "matmul", 1, 0.014)
    assert [*summary_lines(found)] == [
        "profile of step 7: communication 20%, idle 17%, matmul 15%, elementwise 15%, attention 10%, data wait 10%, "
        "optimizer 8%, copies 5%"
    ]


# A rank of two computes from 10 to 40 and from 60 to 85, each time 5 ms more than its operators. It waits 5 ms before
# its first pass, 20 in the middle, and 10 for the other rank, in which it computes a norm for 2 ms.
ONE_SCHEDULE = [
    annotation("ProfilerStep#3", 0, 120),
    annotation("GPipe: rank 1 of 2, 1 micro-batches", 5, 90),
    annotation("stage 1: F 0", 10, 30),
    event("aten::linear", 12, 25),
    event("c10d::recv_", 42, 16),
    annotation("stage 1: B 0", 60, 25),
    event("aten::mm", 60, 20),
    event("aten::linalg_vector_norm", 90, 2),
    event("aten::mm", 100, 5),
]


def test_waiting_within_a_schedule_by_hand():
    """One micro-batch on two stages takes both 6 units, of which each rank works 3."""
    found = breakdown(ONE_SCHEDULE).waiting
    assert found is not None
    assert (found.schedule, found.rank, found.ranks) == ("GPipe", 1, 2)
    assert found.seconds == pytest.approx(0.090) and found.busy_seconds == pytest.approx(0.057)
    assert found.idle == pytest.approx(33 / 90) and found.predicted_idle == pytest.approx(1 / 2)
    assert found.passes == found.planned_passes == {"B": 1, "F": 1}
    kernels = [event("gemm", 12, 30, thread=7, category="kernel"), event("gemm", 30, 20, thread=8, category="kernel")]
    on_device = breakdown([*ONE_SCHEDULE, *kernels]).waiting
    assert on_device is not None and on_device.busy_seconds == pytest.approx(0.038)  # from 12 to 50
    assert breakdown(ONE_STEP).waiting is None


def test_a_step_on_a_device_by_hand():
    """100 ms on the CPU, whose operators only launch; the last kernel ends at 110. Kernels are their caller's kind."""
    kernel = {"category": "kernel", "thread": 7}
    found = breakdown(
        [
            annotation("ProfilerStep#1", 0, 100),
            annotation(DATA_WAIT, 0, 10),
            event("aten::addmm", 10, 5, **{"External id": 5}),
            annotation("Optimizer.step#AdamW.step", 20, 10),
            event("aten::mul", 22, 1, **{"External id": 6}),
            event("some_name", 12, 40, **kernel, **{"External id": 5}),
            event("ncclDevKernel_AllReduce_Sum_f32", 42, 30, thread=8, category="kernel"),
            event("elementwise_kernel", 80, 20, **kernel, **{"External id": 6}),
            event("flash_fwd_kernel", 104, 6, **kernel),
        ]
    )
    expected = {"data_wait": 10, "matmul": 40, "communication": 20, "optimizer": 20, "attention": 6}
    assert milliseconds(found) == expected | {"idle": 110 - sum(expected.values())}
    assert found.communication_seconds == pytest.approx(0.030)
    assert {operator.name for operator in found.operators} >= {"aten::addmm", "aten::mul", "flash_fwd_kernel"}


def test_what_is_compiled_is_told_apart_by_the_names_of_its_kernels():
    """One graph calls all of them; the optimizer's is the optimizer's."""
    names = "triton_red_fused__log_softmax_nll_loss_forward_0", "triton_poi_fused_add_mul_1", "triton_per_fused_mean_2"
    kernels = [event(name, 10 * i, 10, 7, "kernel", **{"External id": 5}) for i, name in enumerate(names, start=1)]
    found = breakdown(
        [
            annotation("ProfilerStep#1", 0, 100),
            event("## Call CompiledFxGraph f1 ##", 5, 5, **{"External id": 5}),
            *kernels,
            annotation("Optimizer.step#AdamWBf16.step", 60, 10),
            event("## Call CompiledFxGraph f2 ##", 62, 5, **{"External id": 6}),
            event("triton_poi_fused_add_3", 70, 10, 7, "kernel", **{"External id": 6}),
        ]
    )
    assert milliseconds(found) == {"loss": 10, "elementwise": 20, "optimizer": 10, "idle": 60}


def test_bytes_of_collectives_by_hand():
    def called(name, start, dims, types):
        return event(f"c10d::{name}", start, 1, **{"Input Dims": dims, "Input type": types})

    def done(name, start, dims, kind):
        return event(name, start, 1, 2, "user_annotation", **{"Input Dims": dims, "Input type": [kind]})

    found = breakdown(
        [
            annotation("ProfilerStep#1", 0, 100),
            called("allreduce_", 1, [[[10, 3], [2]], [], []], ["TensorList", "", "Scalar"]),
            done("gloo:all_reduce", 2, [[10, 3], [2]], "double"),
            called("allreduce_", 3, [[[10]], [], []], ["TensorList", "", "Scalar"]),
            done("gloo:all_reduce", 3, [[10]], "float"),
            called("_allgather_base_", 4, [[20], [10], []], ["c10::BFloat16", "c10::BFloat16", ""]),
            done("gloo:all_gather", 4, [[10]], "c10::BFloat16"),
            called("_reduce_scatter_base_", 5, [[5], [10], []], ["float", "float", ""]),
            done("gloo:all_reduce", 6, [[10]], "float"),
            called("allreduce_", 7, [[[10]], [], []], ["TensorList", "", "Scalar"]),  # not of the all-gather's type
            done("gloo:all_reduce", 8, [[10]], "float"),
            # of DTensor
            called("allgather_into_tensor_coalesced_", 9, [[[20]], [[10]], []], ["TensorList", "TensorList", ""]),
            done("gloo:all_gather", 9, [[10]], "float"),
            called("reduce_scatter_tensor_coalesced_", 11, [[[5]], [[10]], []], ["TensorList", "TensorList", ""]),
            done("gloo:all_reduce", 12, [[10]], "float"),
        ]
    )
    assert [(each.name, each.calls, each.num_bytes, each.untyped) for each in found.collectives] == [
        ("all_reduce", 3, 32 * 8 + 2 * 10 * 4, 0),
        ("all_gather", 2, 20 * 2 + 20 * 4, 0),
        ("reduce_scatter", 2, 2 * 10 * 4, 0),
    ]


def test_a_type_that_the_trace_does_not_name_is_not_guessed():
    dims = {"Input Dims": [[[10]], []], "Input type": ["TensorList", ""]}
    found = breakdown([annotation("ProfilerStep#1", 0, 100), event("c10d::allreduce_", 3, 1, **dims)])
    (reduced,) = found.collectives
    assert (reduced.calls, reduced.num_bytes, reduced.untyped) == (1, 0, 1)
    held = MemoryUsage(weights=0, optimizer=0, gradients=0, gradients_between_steps=0)
    assert "all_reduce: the bytes of 1 calls are not counted" in render_summary(found, held, 0)


def in_ms(found):
    return {each.name: pytest.approx(1000 * each.seconds) for each in found.collectives}


def test_time_of_collectives_on_a_cpu_by_hand():
    """Two calls that return at once, then one that waits for its transfer, which gloo calls an all-reduce."""
    found = breakdown(
        [
            annotation("ProfilerStep#1", 0, 100),
            annotation("gloo:all_reduce", 0, 1, thread=2),  # of a call before the recording
            event("c10d::allreduce_", 10, 1),
            event("c10d::allreduce_", 12, 1),
            annotation("gloo:all_reduce", 13, 4, thread=2),  # until 17
            annotation("gloo:all_reduce", 17, 3, thread=3),  # until 20
            event("c10d::_reduce_scatter_base_", 30, 9),
            annotation("gloo:all_reduce", 31, 5, thread=2),
            event("c10d::barrier", 50, 2),
        ]
    )
    assert in_ms(found) == {"all_reduce": 7 + 8, "reduce_scatter": 9, "barrier": 2}


def test_time_of_collectives_on_a_device_is_that_of_their_kernels():
    kernel = {"thread": 8, "category": "kernel"}
    found = breakdown(
        [
            annotation("ProfilerStep#1", 0, 100),
            event("c10d::_allgather_base_", 10, 1),
            event("c10d::_reduce_scatter_base_", 12, 1),
            event("c10d::recv_", 14, 1),
            event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 30, **kernel),
            event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 50, 5, **kernel),
            event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 60, 2, **kernel),
        ]
    )
    assert in_ms(found) == {"all_gather": 30, "reduce_scatter": 5, "recv": 2}


# Two data-parallel ranks of each of two tensor-parallel groups; this is rank 0. Its group of all ranks is "0".
GROUPS = {"0": [0, 1, 2, 3], "1": [0, 2], "2": [0, 1]}
DIMS = ParallelDims(dp_shard=2, tp=2)


def noted(events, *calls, dims=DIMS, groups=GROUPS):
    """A trace with the notes of rank 0. calls: (start in ms, group) of what the flight recorder saw."""
    configured = [{"pg_name": name, "pg_desc": "undefined", "ranks": ranks} for name, ranks in groups.items()]
    notes = {"rank": 0, "dims": asdict(dims), "calls": [[5000 + int(at * 1e6), "gloo:x", group] for at, group in calls]}
    info = {"pg_config": configured}
    return {"traceEvents": events, "baseTimeNanoseconds": 5000, "distributedInfo": info, NOTES: notes}


def floats(name, start, duration, *sizes, **more):
    dims, types = [[size] for size in sizes], ["float"] * len(sizes)
    return event(f"c10d::{name}", start, duration, **{"Input Dims": dims, "Input type": types}, **more)


def by_dimension(found):
    return {
        (dimension.name, name): (
            each.calls,
            each.num_bytes,
            round(1000 * each.exposed_seconds, 6),
            round(1000 * each.hidden_seconds, 6),
        )
        for dimension in found.dimensions
        for name, each in dimension.collectives.items()
    }


def test_communication_by_dimension_on_a_cpu_by_hand():
    """An all-gather's transfer runs from 12 to 22, 8 ms of it under a norm; that of all ranks begins at 20."""
    events = [
        annotation("ProfilerStep#1", 0, 100),
        floats("_allgather_base_", 10, 2, 20, 10),
        annotation("gloo:all_gather", 12, 10, thread=2),
        event("aten::rsqrt", 12, 8),
        floats("_allgather_base_", 20, 1, 8, 4),
        annotation("gloo:all_gather", 21, 9, thread=3),
        floats("_reduce_scatter_base_", 40, 5, 3, 6),
        annotation("gloo:all_reduce", 41, 6, thread=3),  # until 47
        annotation(f"{PEER}1", 50, 10),
        floats("send", 52, 6, 25),
        annotation("gloo:send", 57, 1),
        floats("_allgather_base_", 70, 1, 2, 1),  # of no group that the trace knows
        floats("_allgather_base_", 80, 1, 2, 1),
    ]
    found = breakdown(attribute(noted(events, (11, "1"), (20.5, "0"), (42, "2"), (70.5, "9"), (75, "2"), (80.5, "0"))))
    assert by_dimension(found) == {
        ("dp", "all_gather"): (1, 80, 4, 8),
        ("dp x tp", "all_gather"): (2, 32 + 8, 10 + 1, 0),
        ("tp", "reduce_scatter"): (1, 24, 7, 0),
        ("tp", "send"): (1, 100, 6, 0),
        (UNKNOWN, "all_gather"): (1, 8, 1, 0),
    }
    # the two all-gathers overlap from 20 to 22
    totals = {each.name: (each.total.calls, each.total.num_bytes, each.total.seconds) for each in found.dimensions}
    assert totals["tp"] == (2, 124, pytest.approx(0.013))
    assert found.communication_seconds == pytest.approx(0.020 + 0.007 + 0.006 + 0.002)
    assert {each.name: each.num_bytes for each in found.collectives}["all_gather"] == 80 + 40 + 8


def test_communication_by_dimension_on_a_device_by_hand():
    """NCCL describes its calls. A kernel has its call's dimension; that of several messages at once its group's."""
    nccl = {"thread": 8, "category": "kernel"}
    events = [
        annotation("ProfilerStep#1", 0, 100),
        floats("_allgather_base_", 10, 2, 20, 10),
        event("record_param_comms", 10.5, 1, **{"Process Group Name": "1", "External id": 3}),
        event("ncclDevKernel_AllGather_RING_LL", 20, 10, **nccl, **{"External id": 3}),
        event("aten::mm", 13, 1, **{"External id": 4}),
        event("gemm", 24, 10, 7, "kernel", **{"External id": 4}),
        event("ncclDevKernel_SendRecv", 40, 5, **nccl, **{"Process Group Name": "2"}),
        event("ncclDevKernel_AllReduce_Sum_f32", 50, 2, **nccl, **{"Process Group Ranks": "[0, 1, 2, 3]"}),
        event("ncclDevKernel_AllReduce_Sum_f32", 60, 1, **nccl, **{"Process Group Ranks": "[0, 1, 2, ...]"}),
    ]
    assert by_dimension(breakdown(attribute(noted(events)))) == {
        ("dp", "all_gather"): (1, 80, 4, 6),
        ("tp", "recv"): (0, 0, 5, 0),
        ("dp x tp", "all_reduce"): (0, 0, 2, 0),
        (UNKNOWN, "all_reduce"): (0, 0, 1, 0),
    }


@pytest.mark.parametrize(
    ("dims", "ranks", "expected"),
    [
        (ParallelDims(dp_replicate=2), (0, 1), "dp"),
        (ParallelDims(dp_replicate=2, dp_shard=2), (0, 2), "dp"),
        (ParallelDims(dp_replicate=2, dp_shard=2), (0, 1, 2, 3), "dp"),
        (ParallelDims(dp_shard=4), (0, 1), "dp"),  # ZeRO-3's second partition
        (ParallelDims(pp=2, dp_shard=2, tp=2), (1, 5), "pp"),
        (ParallelDims(pp=2, dp_shard=2, tp=2), range(8), "pp x dp x tp"),
        (ParallelDims(dp_shard=2, cp=2), (0, 1), "cp"),
        (ParallelDims(dp_shard=2, cp=2), range(4), "dp x cp"),
        (ParallelDims(dp_shard=4, ep=2), (2, 3), "ep"),
        (ParallelDims(dp_shard=4, ep=2), (1, 3), "dp"),
        (ParallelDims(dp_shard=2, ep=2), (0, 1), "dp"),
        (ParallelDims(dp_shard=2, ep=2, tp=2), (0, 1), "tp"),
        (ParallelDims(dp_shard=2), (0,), UNKNOWN),
    ],
)
def test_names_of_dimensions_by_hand(dims, ranks, expected):
    assert dimension(dims, ranks) == expected


def test_tokens_for_experts_are_not_shards_of_weights():
    """Even where the same ranks exchange both."""
    assert dimension(ParallelDims(dp_shard=2, ep=2), (0, 1), of_experts=True) == "ep"


def test_a_trace_without_notes_has_no_dimensions():
    found = breakdown(
        attribute({"traceEvents": [annotation("ProfilerStep#1", 0, 9), floats("_allgather_base_", 1, 1, 2)]})
    )
    assert by_dimension(found) == {(UNKNOWN, "all_gather"): (1, 8, 1, 0)}


def test_the_page_shows_dimensions():
    events = [annotation("ProfilerStep#1", 0, 100), floats("_allgather_base_", 10, 4, 2**19), event("aten::mm", 20, 1)]
    found = breakdown(attribute(noted(events, (11, "1"))))
    held = MemoryUsage(weights=0, optimizer=0, gradients=0, gradients_between_steps=0)
    lines = [line.split() for line in render_summary(found, held, 0).splitlines()]
    assert ["dp", "1.0", "2.00", "4.00", "4.00", "0%"] in lines
    assert ["all_gather", "1.0", "2.00", "4.00", "4.00", "0%"] in lines
    (told,) = summary_values(found, held, 0)["dimensions"]
    numbers = {"calls": 1, "num_bytes": 2**21, "untyped": 0, "hidden_seconds": 0.0}
    numbers["exposed_seconds"] = pytest.approx(0.004)
    assert told == {"name": "dp", **numbers, "collectives": [{"name": "all_gather", **numbers}]}


def test_most_memory_by_hand():
    changes = [(1, 100), (2, 50), (3, -100), (4, 20), (5, -70)]
    memory = [
        {"ph": "i", "name": "[memory]", "ts": at, "args": {"Bytes": size, "Device Type": 0}} for at, size in changes
    ]
    assert breakdown([annotation("ProfilerStep#1", 0, 1), *reversed(memory)]).allocated_bytes == {"cpu": 150}


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no ProfilerStep# range"):
        breakdown([event("aten::mm", 0, 1)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("flash_attn::_flash_attn_forward", "attention"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::linear_cross_entropy", "loss"),
        ("aten::_softmax", "attention"),
        ("aten::_foreach_mul_", "optimizer"),
        ("aten::embedding_dense_backward", "copies"),
        ("## Call CompiledFxGraph fwcwghlztql22rxa ##", "elementwise"),
        ("aten::mul", None),
        ("autograd::engine::evaluate_function: ScaledDotProductFlashAttentionBackward0", None),
    ],
)
def test_the_table(name, kind):
    assert (listed(name) and listed(name).kind) == kind


class Batches:
    """Rows that take 20 ms to come. step: as StepBatches."""

    def __init__(self, step=0, num_steps=6):
        self.step, self._steps = step, range(step, num_steps)

    def __iter__(self):
        for _ in self._steps:
            with record_function(DATA_WAIT):
                time.sleep(0.02)
            self.step += 1
            yield [torch.randint(0, 64, (2, 32))]


def hooks(folder, said, rank=0):
    held = MemoryUsage(weights=1, optimizer=2, gradients=3)
    return recorder.ProfilerHooks(folder, rank, said.append, lambda: None, lambda: said.append("clock"), lambda: held)


def trained(batches, settings, around):
    """The steps that ran."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = []
    profiler = recorder.Profiler(settings, batches.step, around)
    for micro_batches in batches:
        (tokens,) = micro_batches
        token_loss_sum(model(input_ids=tokens).logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(batches.step)
        profiler.after(batches.step)
    return steps


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("profile"), []
    steps = trained(Batches(), Profile(steps=(3, 4)), hooks(folder, said))
    return folder, said, steps


def test_every_kind_of_work_is_found_in_a_real_trace(recording):
    folder, _, steps = recording
    assert steps == [1, 2, 3, 4, 5, 6]
    found = breakdown(read_trace(folder / "step_00000003" / "rank0.pt.trace.json.gz"))
    assert found.steps == (3, 4)
    assert found.shares.keys() == KINDS.keys()
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-6)
    working = set(KINDS) - {"communication"}
    assert all(0 < found.shares[kind] < 1 for kind in working), found.shares
    assert found.seconds["data_wait"] >= 2 * 0.02
    assert found.communication_seconds == 0 and found.collectives == []
    kinds = {operator.name: operator.kind for operator in found.operators}
    assert kinds["aten::mm"] == "matmul"
    assert kinds["aten::_scaled_dot_product_flash_attention_for_cpu_backward"] == "attention"
    # logits of one forward pass and their gradient at least
    assert found.allocated_bytes["cpu"] > 2 * 4 * 2 * 32 * 64


def test_a_run_that_goes_on_records_what_is_left(tmp_path):
    assert trained(Batches(step=3), Profile(steps=(2, 5)), hooks(tmp_path, [])) == [4, 5, 6]
    assert breakdown(read_trace(tmp_path / "step_00000004" / "rank0.pt.trace.json.gz")).steps == (4, 5)


def test_the_page(recording):
    folder, said, _ = recording
    page = (folder / "summary.txt").read_text()
    assert page.startswith("Profile of steps 3 to 4 on rank 0: ")
    assert all(text in page for text in KINDS.values())
    assert "No collectives: one process." in page
    assert len(page.splitlines()) < 60 and max(map(len, page.splitlines())) <= 120
    content = json.loads((folder / "summary.json").read_text())
    assert content["memory_bytes"]["activations"] == content["allocated_bytes"]["cpu"] - 3
    assert len(content["operators"]) == 15
    lines = [line for line in said if line != "clock"]
    # not which kinds: those that take less than 0.5 % of the time, as any may on a busy machine, are left out
    assert re.fullmatch(r"profile of steps 3 to 4: [a-z ]+ \d+%(, [a-z ]+ \d+%)*", lines[0])
    assert len(lines) == 2


def test_nothing_is_touched_where_nothing_is_recorded(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a profiler was made")

    monkeypatch.setattr(recorder, "profile", forbidden)
    said = []
    for settings, rank, step in ((Profile(), 0, 0), (Profile(steps=(2, 3)), 1, 0), (Profile(steps=(2, 3)), 0, 3)):
        profiler = recorder.Profiler(settings, step, hooks(tmp_path, said, rank))
        for number in range(step + 1, 6):
            profiler.after(number)
    assert said == ["profile.steps: steps 2 to 3 are not profiled, because the run resumes after step 3"]
    assert list(tmp_path.iterdir()) == []


def test_nsys_gets_ranges_of_the_steps(tmp_path, monkeypatch):
    calls = []

    class Ranges:
        def __enter__(self):
            calls.append("operators")

        def __exit__(self, *_):
            calls.append("operators end")

    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("step end"))
    monkeypatch.setattr(recorder, "emit_nvtx", Ranges)
    for rank in (0, 1):  # rank 1 records nothing
        profiler = recorder.Profiler(Profile(steps=(3, 4)), 0, hooks(tmp_path, [], rank))
        for step in range(1, 7):
            profiler.after(step)
    steps = ["step 3", "step end", "step 4", "step end"]
    assert calls == ["start", "operators", *steps, "operators end", "stop"] and not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_trace_does_not_end_the_run(tmp_path):
    (tmp_path / "profile").write_text("no folder")
    said = []
    steps = trained(Batches(num_steps=2), Profile(steps=(1, 1)), hooks(tmp_path / "profile", said))
    assert steps == [1, 2]
    assert any("the profile is incomplete" in line for line in said)


def test_a_trace_that_cannot_be_read_does_not_end_the_run(tmp_path, monkeypatch):
    """Where the folder for temporary files is full, torch leaves half of one."""

    def half(_path):
        raise ValueError("Expecting ',' delimiter: line 9")

    said = []
    monkeypatch.setattr(recorder, "read_trace", half)
    assert trained(Batches(num_steps=2), Profile(steps=(1, 1)), hooks(tmp_path, said)) == [1, 2]
    assert "profile.steps: ValueError: Expecting ',' delimiter: line 9; the profile is incomplete" in said


def test_memory_is_not_recorded_on_where_the_trace_cannot_be_written(tmp_path, monkeypatch):
    def full(_path):
        raise OSError(errno.ENOSPC, "no space left on device")

    histories, said = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled: histories.append(enabled))
    one = recorder.Profiler(Profile(steps=(5, 5)), 0, hooks(tmp_path, said))
    one._write(SimpleNamespace(export_chrome_trace=full))
    assert histories == [None]
    assert "the profile is incomplete" in said[-1]


def described(zero_stage: int = 0, pipeline_stages: int = 1) -> SimpleNamespace:
    """What of an EngineDescription decides about gradients."""
    return SimpleNamespace(
        zero_stage=zero_stage,
        num_trained_parameters=20,
        dims=ParallelDims(pp=pipeline_stages, dp_shard=3),
        whole_gradient_bytes=0,
    )


def test_held_bytes_by_hand():
    """2 x (3 x 5 weights and 5 biases), of which one layer is frozen; AdamW keeps two moments and a counter each."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 5), torch.nn.Linear(3, 5).requires_grad_(False)])
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model[0](torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    facts = described()
    expected = MemoryUsage(weights=4 * 40, optimizer=2 * 4 * 20 + 2 * 4, gradients=4 * 20)
    assert memory_usage(model, optimizer, facts) == expected
    assert memory_usage(model, optimizer, described(zero_stage=2)).gradients == 4 * 7
    half = model.bfloat16()  # as adamw_bf16 has it; DeepSpeed sums what its bf16 weights give in fp32
    assert memory_usage(half, optimizer, facts).gradients == 2 * 20
    assert memory_usage(half, optimizer, described(zero_stage=1)).gradients == 4 * 20
    assert memory_usage(half, optimizer, described(pipeline_stages=2)).gradients == 4 * 20


def zero3s(optimizer):
    """As DeepSpeed's around it: a part of every gradient in one buffer."""
    return SimpleNamespace(optimizer=optimizer, grad_partitions_flat_buffer=torch.zeros(7))


@pytest.mark.parametrize(
    ("wrap", "zero_stage", "expected"), [(lambda optimizer: optimizer, 0, 20), (zero3s, 3, 7)], ids=["grad", "buffer"]
)
def test_gradients_that_stay_between_steps_by_hand(wrap, zero_stage, expected):
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters())
    facts = described(zero_stage=zero_stage)
    if zero_stage == 0:
        model(torch.ones(3)).sum().backward()
    held = memory_usage(model, wrap(optimizer), facts)
    assert held.gradients == held.gradients_between_steps == 4 * expected


@pytest.mark.parametrize(("staying", "activations"), [(0, 60), (30, 90), (40, 100)])
def test_what_stays_between_steps_is_not_in_what_a_step_adds(staying, activations):
    """100 bytes above the step's start, 40 of gradients."""
    found = Breakdown((1,), False, 1.0, {}, 0.0, [], [], allocated_bytes={"cpu": 100})
    told = memory(found, MemoryUsage(1, 2, 40, staying))
    assert told == {"weights": 1, "optimizer": 2, "gradients": 40, "activations": activations}


def test_a_compiled_loss_is_loss():
    """Nothing but the range around it tells; the head's own matrix products lie before and after it."""
    events = [
        *(annotation(f"ProfilerStep#{1}", 0, 100), annotation(LOSS, 10, 30)),
        *(
            event("aten::mm", 0, 10),
            event("Torch-Compiled Region: 0/0", 12, 10),
            event("CompiledFunctionBackward", 25, 9),
        ),
        event("aten::mm", 40, 10),
    ]
    assert milliseconds(breakdown(events)) == {"matmul": 20, "loss": 30, "idle": 50}


def test_the_chunked_head_says_what_is_loss():
    head = torch.nn.Linear(4, 8, bias=False)
    hidden, labels = torch.randn(1, 6, 4, requires_grad=True), torch.zeros(1, 6, dtype=torch.long)
    with torch.profiler.profile() as profiler:
        chunked_sums(hidden, head, TokenSums(token_loss_sum, {"labels": labels}))
    inside = [found.name for found in profiler.events() if within(found, LOSS)]
    assert any("log_softmax" in name for name in inside) and not any("mm" in name for name in inside)


def within(found, name: str) -> bool:
    parent = found.cpu_parent
    return parent is not None and (parent.name == name or within(parent, name))
