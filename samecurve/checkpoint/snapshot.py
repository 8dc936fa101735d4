"""This rank's part of a checkpoint: tensors and values, live or copied to host memory, written and read back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.checkpoint import commit, format
from samecurve.checkpoint.format import CheckpointReader, Entry
from samecurve.checkpoint.host_copy import HostCopy
from samecurve.checkpoint.index_excerpts import open_shared
from samecurve.checkpoint.manifest import file_name
from samecurve.checkpoint.resume import STATE
from samecurve.distributed import rng_state
from samecurve.errors import NumericError
from samecurve.storage.fault_injection import fault_point

if TYPE_CHECKING:
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Saved
    from samecurve.storage.filesystem import FileSystem

Taken = tuple[list[Entry], Generator[Tensor, None, None]]
WHOLE = "whole"
"""Prefix of the tensors that rank 0 saves whole."""


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
            return entries, _checked(entries, self._live())
        kept = self.host_copy = self.host_copy or HostCopy(self._values())
        for index, value in enumerate(self._values()):
            kept.keep(index, value)
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)  # the copies to pinned memory are asynchronous
        return entries, _checked(entries, (kept.read(index) for index in range(len(entries))))

    def _live(self) -> Generator[Tensor, None, None]:
        with closing(self._values()) as values:
            for value in values:
                yield value.to("cpu")

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
    """Yield each value in its entry's dtype while it is written, and raise NumericError if one is not finite.

    Otherwise a checkpoint with NaN would pass every verification from then on.
    """
    with closing(values):
        for entry, value in zip(entries, values, strict=True):
            if value.is_floating_point() and not entry.key.startswith(WHOLE) and not torch.isfinite(value).all():
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
