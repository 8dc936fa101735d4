"""This rank's part of a checkpoint: tensors and values, live or copied to host memory, written and read back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.checkpoint import commit, format
from samecurve.checkpoint.format import CheckpointReader, Entry, parse_entry, read_index
from samecurve.checkpoint.manifest import file_name
from samecurve.checkpoint.resume import STATE
from samecurve.distributed import rng_state
from samecurve.errors import NumericError
from samecurve.interfaces.region import Region
from samecurve.storage.fault_points import fault_point

if TYPE_CHECKING:
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Saved
    from samecurve.storage.filesystem import FileSystem

Taken = tuple[list[Entry], Generator[Tensor, None, None]]
WHOLE, BUFFER = "whole", "buffer"
"""Prefixes of the tensors that rank 0 saves whole. They may hold what is not finite, as a mask of -inf does."""


class Snapshot:
    """The tensors that one rank saves."""

    def __init__(self, engine: Saved):
        self._engine = engine
        self.shapes = {name: list(shape) for name, shape in (engine.shapes | engine.state.factors).items()}
        self.host_copy: HostCopy | None = None
        self._whole: dict[str, Tensor] = {}
        # ranks with the same region divide it among themselves, or one of them saves all of it
        self.regions = [(part.name, part.region.part(part.saved)) for part in engine.state.ranges() if part.saved]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in this rank's file."""
        return sum(entry.nbytes for entry in self._entries())

    def _entries(self) -> list[Entry]:
        state = self._engine.state
        entries = []
        for name, region in self.regions:
            for kind in state.kinds[name]:
                dtype = torch.uint8 if (name, kind) in state.codes else torch.float32
                entries.append(Entry(f"{kind}/{name}", region.numel, dtype))
        return entries

    def take(self, copy: bool, whole: Mapping[str, Tensor] | None = None) -> Taken:
        """Return the entries of this rank's file and a generator of their values, one tensor at a time.

        Args:
            copy: True copies all values now, so that training may continue; host memory grows once by the size of this
                rank's part, in the dtypes of the live tensors. False reads each tensor when it is requested, with one
                in memory at a time; meanwhile the engine keeps its state accessible, so close the generator if it is
                not exhausted.
            whole: tensors of any shape to save besides, by their key in the file.
        """
        self._whole = {f"rng/{name}": state for name, state in rng_state.capture(self._engine.device).items()}
        self._whole |= {key: tensor.detach().reshape(-1) for key, tensor in (whole or {}).items()}
        entries = self._entries()
        entries += [Entry(key, tensor.numel(), tensor.dtype) for key, tensor in self._whole.items()]
        if not copy:
            return entries, _checked(entries, self._values())
        kept = self.host_copy = self.host_copy or HostCopy(self._values())
        for index, value in enumerate(self._values()):
            kept.keep(index, value)
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)  # the copies to pinned memory are asynchronous
        return entries, _checked(entries, (kept.read(index) for index in range(len(entries))))

    def _values(self) -> Generator[Tensor, None, None]:
        with closing(self._engine.state.visit()) as visited:
            for part, _, tensor in visited:
                if part.saved:
                    yield tensor[part.saved.start : part.saved.stop]
        yield from self._whole.values()

    def write(self, files: FileSystem, folder: Path, rank: int, taken: Taken, busy: Callable[[], None]) -> tuple:
        """Write this rank's file and return what `commit.Content.write` does."""
        entries, values = taken

        def reported(chunks: Iterator) -> Iterator:
            for chunk in chunks:
                busy()
                yield chunk

        with closing(values):
            chunks = reported(format.safetensors_chunks(entries, values))
            return [commit.write_file(files, folder / file_name(rank), chunks)], self.regions

    def small_files(self, state: bytes, regions: list) -> dict[str, bytes]:
        """Return the files that rank 0 adds: state.json with this content, and the index of all ranks' regions."""
        return {STATE: state, format.INDEX: format.safetensors_index(self.shapes, regions)}


def _checked(entries: list[Entry], values: Generator[Tensor, None, None]) -> Generator[Tensor]:
    """Yield each value on the CPU, in its entry's dtype, and raise NumericError if one is not finite.

    Otherwise a checkpoint with NaN would pass every verification from then on.
    """
    with closing(values):
        for entry, live in zip(entries, values, strict=True):
            value = live.to("cpu")
            if (
                value.is_floating_point()
                and not entry.key.startswith((WHOLE, BUFFER))
                and not torch.isfinite(value).all()
            ):
                raise NumericError(f"{entry.key} holds values that are not finite")
            yield value.to(entry.dtype)


def generators_of(engine: Saved, world: ControlGroup) -> dict:
    """Describe the layout of the random generators. If it is unchanged, each rank restores its own generators."""
    return {"ranks": world.size, "data_parallel_size": engine.shard[1], "device": engine.device.type}


def restore(
    folder: Path, engine: Saved, saved: dict, world: ControlGroup, seed: int | None, busy: Callable[[], None]
) -> CheckpointReader:
    """Read weights, optimizer state and loss scale of a verified checkpoint into the live engine. Collective.

    Args:
        saved: the checkpoint's state.json.
        seed: restore the random generators too, or seed them with this number if their layout has changed; None leaves
            them as they are.
        busy: called for each tensor.

    Raises:
        CheckpointError: on all ranks if model and checkpoint differ, on one rank if its part cannot be read.
    """
    fault_point("load.read")
    wanted = [(part.name, part.region) for part in engine.state.ranges()]
    reader = open_shared(folder, world, wanted, engine.shapes | engine.state.factors)
    with torch.no_grad():
        for part, kind, tensor in engine.state.visit(writing=True):
            busy()
            tensor.copy_(reader.read(part.name, kind, part.region))
        engine.state.finish(saved["updates"])
    engine.loss_scale_state = saved["loss_scale"]
    if seed is not None and saved["generators"] == generators_of(engine, world):
        names = rng_state.capture(engine.device)
        rng_state.restore({name: reader.tensor(world.rank, f"rng/{name}") for name in names}, engine.device)
    elif seed is not None:
        rng_state.reseed(seed, saved["step"], world.rank)
    fault_point("load.done")
    return reader


_ALIGNMENT = 16  # Tensor.view(dtype) needs an offset that is a multiple of the dtype's size
_SMALLEST_BYTES = 2**16  # of a block: totals are rounded up to it, or their low bits would become tiny blocks


class HostCopy:
    """Buffers for 1-D tensors of known sizes and dtypes, reused between saves: allocating pinned memory is slow.

    PyTorch rounds every pinned allocation up to a power of two and never gives it back. One buffer per tensor, or one
    for all of them, could therefore take twice the bytes. The blocks here are powers of two that add up to the total,
    and a tensor may continue in the next block.

    Args:
        tensors: those to copy; only their sizes, dtypes and devices are read.
    """

    def __init__(self, tensors: Iterator[Tensor]):
        self._sizes, on_gpu, total = [], False, 0
        for tensor in tensors:
            self._sizes.append((total, tensor.numel(), tensor.dtype))
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            on_gpu |= tensor.device.type == "cuda"
        self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in block_sizes(total)]

    def keep(self, index: int, value: Tensor) -> None:
        """Copy `value`, the index-th tensor. From a GPU the copy is asynchronous: synchronize before `read`."""
        parts = self._parts(index)
        for part, piece in zip(parts, value.split([len(part) for part in parts]), strict=True):
            part.copy_(piece, non_blocking=True)

    def read(self, index: int) -> Tensor:
        """Return the copy of the index-th tensor: 1-D, a view of the buffer where one block has all of it."""
        parts = self._parts(index)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, index: int) -> list[Tensor]:
        """Return views of the blocks that hold the index-th tensor, in order; at least one."""
        begin, numel, dtype = self._sizes[index]
        end, first, parts = begin + numel * dtype.itemsize, 0, []
        for block in self.blocks:
            low, high = max(begin - first, 0), min(end - first, len(block))
            if low < high:
                parts.append(block[low:high].view(dtype))
            first += len(block)
        return parts or [torch.empty(0, dtype=dtype)]


def block_sizes(total: int) -> list[int]:
    """Split a number of bytes, rounded up to 64 KiB, into different powers of two, the largest first."""
    rounded = -(-total // _SMALLEST_BYTES) * _SMALLEST_BYTES
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


Wanted = Sequence[tuple[str, Region]]


def open_shared(
    folder: Path, world: ControlGroup, wanted: Wanted, shapes: Mapping[str, Iterable[int]]
) -> CheckpointReader:
    """Open a checkpoint for reading the wanted regions only. Collective.

    Rank 0 alone reads the index, and each rank gets the entries of its own regions: with 16,384 ranks and 300
    parameters the index has 100 MB.

    Args:
        wanted: (name, region) of everything that this rank will read.
        shapes: the model's, which the checkpoint's must match.

    Raises:
        CheckpointError: the index cannot be read, or is of another model; raised on all ranks.
    """
    return CheckpointReader(
        folder, world.gather_scatter(list(wanted), lambda of_all: _excerpts(folder, shapes, of_all))
    )


def _excerpts(folder: Path, shapes: Mapping[str, Iterable[int]], of_all: Iterable[Wanted]) -> list[dict]:
    content = read_index(folder)
    CheckpointReader(folder, content).check_names(shapes)
    entries = {name: _Entries(item["ranges"]) for name, item in content.items()}
    excerpts = []
    for wanted in of_all:
        ranges: dict[str, list] = {}
        for name, region in wanted:
            known = ranges.setdefault(name, [])
            known += [entry for entry in entries[name].near(region) if entry not in known]
        excerpts.append({name: {"shape": content[name]["shape"], "ranges": near} for name, near in ranges.items()})
    return excerpts


class _Entries:
    """The entries of one parameter, sorted by where their regions begin."""

    def __init__(self, ranges: list[list[int]]):
        self._entries = sorted(ranges, key=lambda entry: entry[1])
        regions = [parse_entry(entry)[1] for entry in self._entries]
        self._starts = [region.start for region in regions]
        self._longest = max((_stop(region) - region.start for region in regions), default=0)

    def near(self, region: Region) -> list[list[int]]:
        """List the entries that may share values with a region, and few others."""
        # even the longest entry does not reach the region if it begins before this
        first = bisect_left(self._starts, region.start - self._longest + 1)
        return self._entries[first : bisect_left(self._starts, _stop(region))]


def _stop(region: Region) -> int:
    return region.start + (region.count - 1) * region.stride + region.length
