"""The portable layout: any ranges written by any number of ranks are read back as any other ranges."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from samecurve.checkpoint.format import INDEX, CheckpointReader, Entry, safetensors_chunks, safetensors_index
from samecurve.checkpoint.manifest import file_name
from samecurve.engines.sharded_state import split
from samecurve.errors import CheckpointError

SHAPES = {"embed": (7, 5), "norm": (5,)}
VALUES = {f"{kind}/{name}": torch.randn(torch.Size(shape).numel()) for name, shape in SHAPES.items() for kind in "wm"}


def write(folder, num_ranks: int, cut=split) -> CheckpointReader:
    ranges = []
    for rank in range(num_ranks):
        own = [(name, *cut(0, torch.Size(shape).numel(), rank, num_ranks)) for name, shape in SHAPES.items()]
        entries = [Entry(f"{kind}/{name}", stop - start) for name, start, stop in own for kind in "wm"]
        values = [VALUES[f"{kind}/{name}"][start:stop] for name, start, stop in own for kind in "wm"]
        (folder / file_name(rank)).write_bytes(b"".join(bytes(chunk) for chunk in safetensors_chunks(entries, values)))
        ranges.append(own)
    (folder / INDEX).write_bytes(safetensors_index(SHAPES, ranges))
    return CheckpointReader(folder)


def test_a_file_is_what_safetensors_reads(tmp_path):
    write(tmp_path, 1)
    found = load_file(tmp_path / file_name(0))
    assert found.keys() == VALUES.keys()
    assert all(torch.equal(found[key], VALUES[key]) for key in VALUES)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 40])
def test_any_range_is_read_whoever_wrote_it(num_ranks, tmp_path):
    reader = write(tmp_path, num_ranks)
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice(list(SHAPES))
        numel = torch.Size(SHAPES[name]).numel()
        start = draw.randrange(numel)
        stop = draw.randrange(start + 1, numel + 1)
        kind = draw.choice("wm")
        assert torch.equal(reader.read(name, kind, start, stop), VALUES[f"{kind}/{name}"][start:stop])


def test_a_part_that_nobody_wrote_is_an_error(tmp_path):
    reader = write(tmp_path, 2, cut=lambda start, stop, rank, count: (1, 3) if rank else (4, 5))
    with pytest.raises(CheckpointError, match="w of norm holds 3 of the 5 values from 0 on"):
        reader.read("norm", "w", 0, 5)


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"shape": [1]}}', "\x80"])
def test_an_index_that_is_none_is_an_error(content, tmp_path):
    (tmp_path / INDEX).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="index.json"):
        CheckpointReader(tmp_path)


def test_another_model_is_named_parameter_by_parameter(tmp_path):
    reader = write(tmp_path, 1)
    with pytest.raises(CheckpointError) as error:
        reader.check_names({"embed": (5, 7), "head": (2,)})
    assert str(error.value).splitlines()[1:] == [
        "  embed: (7, 5) in the checkpoint, (5, 7) in the model",
        "  head: only in the model",
        "  norm: only in the checkpoint",
    ]


def test_the_index_by_hand():
    content = safetensors_index({"w": (2, 3)}, [[("w", 0, 4)], [("w", 4, 6)]])
    assert json.loads(content) == {"w": {"shape": [2, 3], "ranges": [[0, 0, 4], [1, 4, 6]]}}


def test_parts_are_nearly_equal_and_leave_nothing_out():
    assert [split(10, 20, index, 3) for index in range(3)] == [(10, 13), (13, 16), (16, 20)]
    assert [split(0, 1, index, 3) for index in range(3)] == [(0, 0), (0, 0), (0, 1)]
