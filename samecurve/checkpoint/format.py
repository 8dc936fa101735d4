"""Tensor files of a checkpoint: one safetensors file per rank, and an index of the regions that each rank wrote.

    rank_00000.safetensors    "weight/model.embed_tokens.weight": fp32 (numel,), a region of the flattened parameter,
                              "exp_avg/...", "exp_avg_sq/...": the same region of its optimizer state (here AdamW's);
                              fp32 represents bf16 values exactly; 8-bit codes are uint8,
                              "rng/...": uint8, the state of this rank's random generators
                              "factor/...": a region of an optimizer state whose shape is not the parameter's, named
                              after both: "parameter.row_var" (Adafactor), "parameter.absmax1" (8-bit AdamW)
                              "whole/...": a tensor that rank 0 saved whole, in its own dtype: a buffer, or part of an
                              object that a script registered
    index.json                {name: {"shape": [...], "ranges": [[rank, start, stop], ...]}}; a region of several pieces
                              (the runs of Region) is [rank, start, length, count, stride] instead

Any safetensors reader can open the files. They contain no code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samecurve.checkpoint.manifest import file_name
from samecurve.errors import CheckpointError
from samecurve.interfaces.region import Region, overlaps
from samecurve.storage.records import read_record

INDEX = "index.json"
_SCHEMA = {"*": {"shape": list, "ranges": list}}
_LARGEST_INDEX = 2**32  # bytes; 16,384 ranks with 300 parameters write 100 MB
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
DTYPES |= {torch.bool: "BOOL"}
_ALIGNMENT = 8


class Entry(NamedTuple):
    """Key, shape (numel,) and dtype of one tensor in a file, without its values."""

    key: str
    numel: int
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def safetensors_chunks(entries: list[Entry], values: Iterable[Tensor]) -> Iterator[memoryview | bytes]:
    """Generate a safetensors file piece by piece.

    The format is 8 bytes with the length of the header, a JSON header, and the data
    (https://github.com/huggingface/safetensors#format).

    Args:
        entries: the tensors of the file, in order.
        values: contiguous 1-D CPU tensors in the order of `entries`. They are consumed one at a time and need not be in
            memory together.
    """
    header, offset = {}, 0
    for entry in entries:
        header[entry.key] = {
            "dtype": DTYPES[entry.dtype],
            "shape": [entry.numel],
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # as safetensors itself does: white space, which JSON ignores, puts the data at a multiple of 8 bytes
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for entry, tensor in zip(entries, values, strict=True):
        assert tensor.shape == (entry.numel,) and tensor.dtype == entry.dtype, f"{entry} came as {tensor.shape}"
        if entry.numel:  # an empty view cannot be cast
            yield tensor.view(torch.uint8).numpy().data


class CheckpointReader:
    """Reader of arbitrary regions of a checkpoint's tensors, independent of the ranks that wrote them.

    Only the index is kept in memory.

    Args:
        index: the content of index.json, or the part of it that is needed; read from the folder if None.

    Raises:
        CheckpointError: the index cannot be read.
    """

    def __init__(self, folder: Path, index: dict | None = None):
        self.folder = folder
        try:
            content = read_index(folder) if index is None else index
            self._regions = {name: [parse_entry(entry) for entry in item["ranges"]] for name, item in content.items()}
            self.shapes: dict[str, tuple[int, ...]] = {name: _integers(item["shape"]) for name, item in content.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX}: cannot be read as an index ({error})") from error

    def check_names(self, shapes: Mapping[str, Iterable[int]]) -> None:
        """Raise CheckpointError if the model's trained parameters differ from the checkpoint's in name or shape."""
        wanted = {name: tuple(shape) for name, shape in shapes.items()}
        problems = [f"{name}: only in the checkpoint" for name in self.shapes.keys() - wanted.keys()]
        problems += [f"{name}: only in the model" for name in wanted.keys() - self.shapes.keys()]
        problems += [
            f"{name}: {self.shapes[name]} in the checkpoint, {shape} in the model"
            for name, shape in wanted.items()
            if self.shapes.get(name, shape) != shape
        ]
        if problems:
            shown = "\n".join(f"  {problem}" for problem in sorted(problems)[:8])
            raise CheckpointError(f"{self.folder}: the checkpoint's parameters differ from the model's\n{shown}")

    def read(self, name: str, kind: str, region: Region) -> Tensor:
        """Read one region of a flattened parameter or of its optimizer state.

        Args:
            name: the parameter.
            kind: "weight" or an optimizer state such as "exp_avg".
            region: the values to read.

        Returns:
            fp32 (region.numel,) on the CPU, which also holds 8-bit codes exactly.

        Raises:
            CheckpointError: no file contains some part of the region.
        """
        values = torch.empty(region.numel, dtype=torch.float32)
        covered = 0
        for rank, written in self._regions.get(name, ()):
            for shared in overlaps(region, written):
                rows, columns = shared.rows, shared.columns
                stop = shared.second + (rows - 1) * shared.second_pitch + columns
                part = self.tensor(rank, f"{kind}/{name}", shared.second, stop)
                into = values.as_strided((rows, columns), (shared.first_pitch, 1), shared.first)
                into.copy_(part.as_strided((rows, columns), (shared.second_pitch, 1)))
                covered += rows * columns
        if covered != region.numel:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} holds {covered} of the {region.numel} values from {region.start} on"
            )
        return values

    def tensor(self, rank: int, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the slice [start, stop) of one tensor from the file of one rank.

        Args:
            rank: the rank that wrote the file.
            key: name of the tensor in the file, for example "exp_avg/lm_head.weight".
            start: first value of the slice, 0-based.
            stop: the value after the last one; None for all values from `start` on.

        Returns:
            (stop - start,), on the CPU, in the dtype of the file.

        Raises:
            CheckpointError: the tensor cannot be read, or does not have the values from `start` to `stop`.
        """
        path = self.folder / file_name(rank)
        try:
            with safe_open(path, framework="pt") as file:  # reopened each time: pages of an open mapping stay in memory
                values = file.get_slice(key)[start:stop]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {key} cannot be read ({error})") from error
        # of a forged tensor with more dimensions, safetensors would slice the first one
        if stop is not None and values.shape != (stop - start,):
            raise CheckpointError(
                f"{path}: expected {stop - start} values of {key} from {start} on, found {tuple(values.shape)}"
            )
        return values


def read_index(folder: Path) -> dict:
    """Read index.json. Raises CheckpointError."""
    return read_record(folder / INDEX, _SCHEMA, _LARGEST_INDEX).require(CheckpointError, "use another checkpoint")


def _integers(values: list, length: int | None = None) -> tuple[int, ...]:
    if length not in (None, len(values)) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"expected integers of 0 or more, found {values!r:.40}")
    return tuple(values)


def parse_entry(entry: list) -> tuple[int, Region]:
    """Parse an entry of the index: the rank that wrote the region, and the region."""
    if len(entry) == 3:
        rank, start, stop = _integers(entry)
        return rank, Region(start, stop - start)
    rank, *region = _integers(entry, 5)
    return rank, Region(*region)


def safetensors_index(shapes: Mapping[str, Iterable[int]], regions: Iterable[Iterable[tuple[str, Region]]]) -> bytes:
    """Build the content of index.json.

    Args:
        shapes: the full shape of every tensor, by name.
        regions: for each rank in order, the (name, region) that it wrote.
    """
    content = {name: {"shape": list(shape), "ranges": []} for name, shape in shapes.items()}
    for rank, wrote in enumerate(regions):
        for name, region in wrote:
            several = region.count > 1
            entry = region if several else (region.start, region.start + region.length)
            content[name]["ranges"].append([rank, *entry])
    return json.dumps(content).encode()
