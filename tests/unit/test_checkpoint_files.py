"""The portable layout: any regions written by any number of ranks are read back as any other regions."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from samecurve.checkpoint.format import (
    INDEX,
    CheckpointReader,
    Entry,
    read_index,
    safetensors_chunks,
    safetensors_index,
)
from samecurve.checkpoint.manifest import file_name
from samecurve.checkpoint.snapshot import _Entries, _excerpts, open_shared
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import CheckpointError
from samecurve.interfaces.region import Region

SHAPES = {"embed": (7, 5), "norm": (5,)}
VALUES = {f"{kind}/{name}": torch.randn(torch.Size(shape).numel()) for name, shape in SHAPES.items() for kind in "wm"}


def rows(shape: tuple[int, ...], rank: int, num_ranks: int) -> Region:
    whole = Region(0, torch.Size(shape).numel())
    return whole.part(whole.split(rank, num_ranks))


def columns(shape: tuple[int, ...], rank: int, num_ranks: int) -> Region:
    if len(shape) == 1:
        return rows(shape, rank, num_ranks)
    start, stop = shape[1] * rank // num_ranks, shape[1] * (rank + 1) // num_ranks
    return Region(start, stop - start, shape[0], shape[1])


def values_of(key: str, region: Region) -> torch.Tensor:
    shape = (region.count, region.length)
    return VALUES[key].as_strided(shape, (region.stride, 1), region.start).flatten().contiguous()


def write(folder, num_ranks: int, cut=rows) -> CheckpointReader:
    regions = []
    for rank in range(num_ranks):
        own = [(name, cut(shape, rank, num_ranks)) for name, shape in SHAPES.items()]
        entries = [Entry(f"{kind}/{name}", region.numel) for name, region in own for kind in "wm"]
        values = [values_of(f"{kind}/{name}", region) for name, region in own for kind in "wm"]
        (folder / file_name(rank)).write_bytes(b"".join(bytes(chunk) for chunk in safetensors_chunks(entries, values)))
        regions.append(own)
    (folder / INDEX).write_bytes(safetensors_index(SHAPES, regions))
    return CheckpointReader(folder)


def test_a_file_is_what_safetensors_reads(tmp_path):
    write(tmp_path, 1)
    found = load_file(tmp_path / file_name(0))
    assert found.keys() == VALUES.keys()
    assert all(torch.equal(found[key], VALUES[key]) for key in VALUES)


@pytest.mark.parametrize("cut", [rows, columns])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 40])
def test_any_region_is_read_whoever_wrote_it(num_ranks, cut, tmp_path):
    reader = write(tmp_path, num_ranks, cut)
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice(list(SHAPES))
        numel = torch.Size(SHAPES[name]).numel()
        start = draw.randrange(numel)
        stop = draw.randrange(start + 1, numel + 1)
        kind = draw.choice("wm")
        assert torch.equal(reader.read(name, kind, Region(start, stop - start)), VALUES[f"{kind}/{name}"][start:stop])
    for rank in range(3):
        region = columns(SHAPES["embed"], rank, 3)
        assert torch.equal(reader.read("embed", "w", region), values_of("w/embed", region))


def test_a_part_that_nobody_wrote_is_an_error(tmp_path):
    reader = write(tmp_path, 2, cut=lambda shape, rank, num_ranks: Region(1, 2) if rank else Region(4, 1))
    with pytest.raises(CheckpointError, match="w of norm holds 3 of the 5 values from 0 on"):
        reader.read("norm", "w", Region(0, 5))


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
    shapes = {"w": (2, 3), "o": (4, 6)}
    content = safetensors_index(shapes, [[("w", Region(0, 4))], [("w", Region(4, 2)), ("o", Region(3, 3, 4, 6))]])
    assert json.loads(content) == {
        "w": {"shape": [2, 3], "ranges": [[0, 0, 4], [1, 4, 6]]},
        "o": {"shape": [4, 6], "ranges": [[1, 3, 3, 4, 6]]},
    }


@pytest.mark.parametrize("cut", [rows, columns])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_excerpts_of_the_index_are_enough_for_each_rank(num_ranks, cut, tmp_path):
    """Of contiguous regions and of columns, read by other ranks than wrote them."""
    write(tmp_path, 5, cut=cut)
    content = read_index(tmp_path)
    of_all = [[(name, columns(shape, rank, num_ranks)) for name, shape in SHAPES.items()] for rank in range(num_ranks)]
    for wanted, excerpt in zip(of_all, _excerpts(tmp_path, SHAPES, of_all), strict=True):
        reader, whole = CheckpointReader(tmp_path, excerpt), CheckpointReader(tmp_path, content)
        assert all(
            torch.equal(reader.read(name, kind, region), whole.read(name, kind, region))
            for name, region in wanted
            for kind in "wm"
        )


def test_an_excerpt_does_not_grow_with_the_number_of_ranks():
    for num_ranks in (8, 512):
        entries = _Entries([[rank, 4 * rank, 4 * rank + 4] for rank in reversed(range(num_ranks))])
        assert entries.near(Region(8, 4)) == [[2, 8, 12]]
        assert entries.near(Region(10, 4)) == [[2, 8, 12], [3, 12, 16]]
    assert _Entries([]).near(Region(0, 4)) == []


def test_another_models_index_is_every_ranks_error(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match="head: only in the model"):
        open_shared(tmp_path, ControlGroup(), [], {**SHAPES, "head": (2,)})
