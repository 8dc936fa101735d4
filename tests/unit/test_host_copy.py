"""The copy of a background save: its bytes are those of the live tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samecurve.checkpoint.snapshot import HostCopy, Snapshot, block_sizes
from samecurve.interfaces.region import Region
from samecurve.interfaces.sharded_state import ShardRange

MIB = 2**20


@pytest.mark.parametrize("total", [0, 1, 2**16, 3 * MIB, 235 * MIB, 2_179_989_504, 96_000_000_001])
def test_blocks_are_powers_of_two_that_add_up(total):
    """The allocator rounds up to them: an fp32 embedding of 152,064 x 3,584 in one buffer would take 4 GiB."""
    found = block_sizes(total)
    assert all(size & (size - 1) == 0 for size in found)
    assert total <= sum(found) < total + 2**16


def test_tensors_of_any_dtype_come_back_wherever_they_lie():
    torch.manual_seed(0)
    tensors = [
        torch.randn(numel).to(dtype) for numel in (1, 0, 90_001, 33) for dtype in (torch.float32, torch.bfloat16)
    ]
    tensors.append(torch.arange(100_003, dtype=torch.int64).to(torch.uint8))
    kept = HostCopy(iter(tensors))
    blocks = {block.untyped_storage().data_ptr() for block in kept.blocks}
    read = [kept.read(index) for index, tensor in enumerate(tensors) if tensor.numel()]
    views = [tensor.untyped_storage().data_ptr() in blocks for tensor in read]
    assert len(blocks) > 1 and True in views and False in views  # some in one block, some over several
    for _ in range(2):  # the buffers are reused
        for index, tensor in enumerate(tensors):
            kept.keep(index, tensor)
        for index, tensor in enumerate(tensors):
            found = kept.read(index)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        tensors = [tensor.flip(0) for tensor in tensors]


def test_a_copy_of_bf16_state_takes_two_bytes_per_value_and_is_written_in_fp32():
    live = {kind: torch.randn(MIB).bfloat16() for kind in ("weight", "exp_avg", "exp_avg_sq")}
    held = ShardRange("w", Region(0, MIB), range(MIB))
    state = SimpleNamespace(
        factors={},
        codes=(),
        kinds={"w": tuple(live)},
        ranges=lambda: [held],
        visit=lambda: ((held, kind, tensor) for kind, tensor in live.items()),
    )
    engine = SimpleNamespace(state=state, shapes={"w": torch.Size([MIB])}, device=torch.device("cpu"))
    snapshot = Snapshot(engine)  # pyright: ignore[reportArgumentType]
    entries, values = snapshot.take(copy=True)
    expected = {f"{kind}/w": tensor.float() for kind, tensor in live.items()}
    for tensor in live.values():
        tensor.zero_()  # training goes on
    found = dict(zip((entry.key for entry in entries), values, strict=True))
    assert all(found[key].dtype == torch.float32 and torch.equal(found[key], expected[key]) for key in expected)
    assert snapshot.host_copy is not None
    states = sum(entry.numel for entry in entries if entry.key.startswith("rng/"))
    assert sum(map(len, snapshot.host_copy.blocks)) < 2 * 3 * MIB + states + 2 * 2**16
