"""memory.gradient_sync: what is said of its memory. See also test_rank_symmetry.py, and test_capabilities.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from test_console import FACTS, facts

from samecurve.accelerator import fsdp
from samecurve.config.schema import Batch, Memory
from samecurve.metrics.console import header_lines
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Strategy

SHAPES = {"a": torch.Size([3, 5]), "b": torch.Size([7])}


STRATEGIES = {
    "single": Strategy(),
    "ddp": Strategy(distributed=True, dims=ParallelDims(dp_replicate=2)),
    "fsdp": Strategy(distributed=True, sharding="fsdp", dims=ParallelDims(dp_shard=2)),
}


def plan(name, sync, micro_batch_size=2):
    strategy = STRATEGIES[name]
    batch = Batch(global_batch_size=8, micro_batch_size=micro_batch_size, sequence_length=1)
    return SimpleNamespace(strategy=strategy, recipe=SimpleNamespace(batch=batch, memory=Memory(gradient_sync=sync)))


def test_what_whole_gradients_take():
    last = "last_micro_batch"
    assert fsdp.whole_gradient_bytes(plan("fsdp", last), SHAPES, torch.float32) == 4 * (15 + 7)
    assert fsdp.whole_gradient_bytes(plan("fsdp", "auto"), SHAPES, torch.float32) == 0
    assert fsdp.whole_gradient_bytes(plan("fsdp", last, micro_batch_size=4), SHAPES, torch.float32) == 0  # one of them
    assert fsdp.whole_gradient_bytes(plan("ddp", last), SHAPES, torch.float32) == 0  # it holds them in any case
    assert [fsdp.reduces_once(plan(*each)) for each in (("ddp", "auto"), ("fsdp", "auto"), ("single", last))] == [
        True,
        False,
        False,
    ]


def test_it_is_said_before_the_first_step():
    changed = facts(engine={"whole_gradient_bytes": 3 * 2**19}, allocator="expandable_segments:True (X)")
    told = dict(header_lines(changed))
    shown = "unsharded while accumulating: 1.5 MiB on each rank (memory.gradient_sync: last_micro_batch)"
    assert told["gradients"] == shown
    assert told["allocator"] == "expandable_segments:True (X)"
    assert not {"gradients", "allocator"} & dict(header_lines(FACTS)).keys()
