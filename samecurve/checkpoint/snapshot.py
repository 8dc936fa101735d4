"""Snapshot of this rank's part of a checkpoint: tensors and values, live or copied to host memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.checkpoint.format import Entry
from samecurve.checkpoint.host_copy import HostCopy
from samecurve.distributed import rng_state
from samecurve.errors import NumericError

if TYPE_CHECKING:
    from samecurve.interfaces.engine import Engine


class Snapshot:
    """The tensors that one rank saves."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.shapes = {name: list(shape) for name, shape in (engine.shapes | engine.state.factors).items()}
        self.host_copy: HostCopy | None = None
        self._generators: dict[str, Tensor] = {}
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

    def take(self, copy: bool) -> tuple[list[Entry], Generator[Tensor, None, None]]:
        """Return the entries of this rank's file and a generator of their values, one tensor at a time.

        Args:
            copy: True copies all values now, so that training may continue; host memory grows once by the size of this
                rank's part, in the dtypes of the live tensors. False reads each tensor when it is requested, with one
                in memory at a time; meanwhile the engine keeps its state accessible, so close the generator if it is
                not exhausted.
        """
        self._generators = rng_state.capture(self._engine.device)
        entries = self._entries()
        entries += [Entry(f"rng/{name}", state.numel(), torch.uint8) for name, state in self._generators.items()]
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
        yield from self._generators.values()


def _checked(entries: list[Entry], values: Generator[Tensor, None, None]) -> Generator[Tensor]:
    """Yield each value in its entry's dtype while it is written, and raise NumericError if one is not finite.

    Otherwise a checkpoint with NaN would pass every verification from then on.
    """
    with closing(values):
        for entry, value in zip(entries, values, strict=True):
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise NumericError(f"{entry.key} holds values that are not finite")
            yield value.to(entry.dtype)
