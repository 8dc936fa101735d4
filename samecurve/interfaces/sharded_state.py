"""A rank's shard of weights and optimizer state, as regions of flattened tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from samecurve.interfaces.region import Region


class ShardRange(NamedTuple):
    """This rank's region of the flattened parameter `name`.

    `saved` says which of the region's values, counted from 0, this rank writes to a checkpoint. Ranks that hold the
    same region divide it among themselves, or one of them saves all and the others nothing.
    """

    name: str
    region: Region
    saved: range


class Master(NamedTuple):
    """Where the optimizer keeps this rank's region of the weight `name`.

    Attributes:
        parameter: the optimizer's tensor; the region is `numel` values of its flattened local part, from `start` on.
        working: returns the region, in any shape, as the forward pass reads it now; None if it is not in memory.
        shape: the weight's full shape.
    """

    name: str
    parameter: Tensor
    start: int
    numel: int
    working: Callable[[], Tensor | None]
    shape: tuple[int, ...]


class SavedState(Protocol):
    """What checkpoints read and write: this rank's shards of weights and optimizer state.

    Attributes:
        kinds: for each parameter's name WEIGHT and the names of the optimizer states that have the parameter's shape;
            for "parameter.state" of each optimizer state of another shape, and for QUEUE, FACTOR.
        factors: full shape of each of those other states, by the same names.
        codes: (name, kind) of the uint8 tensors; all others are fp32 or bf16.
    """

    kinds: Kinds
    factors: dict[str, tuple[int, ...]]
    codes: Container[tuple[str, str]]

    def ranges(self) -> list[ShardRange]:
        """List this rank's non-empty regions in the order of `visit`."""
        ...

    def visit(self, writing: bool = False) -> Visit:
        """Yield each region once per kind, with its live tensor of shape (region.numel,).

        A tensor is valid only until the next one is yielded. Changes to the tensors persist only if `writing` is true.
        """
        ...

    def finish(self, updates: int) -> None:
        """Set the step counter and what the next forward pass reads, after a visit that wrote. Collective."""
        ...


class State(SavedState, Protocol):
    """An engine's state, of which training reads and writes the weights alone, too."""

    def weights(
        self, names: Container[str] | None = None, writing: bool = False
    ) -> Iterator[tuple[ShardRange, Tensor]]:
        """Yield the regions of the weights alone, of some or all names, as `visit` does; makes no optimizer state."""
        ...

    def refresh(self) -> None:
        """Set the weights that the next forward pass reads to those that a visit has written. Collective."""
        ...

    def masters(self) -> Iterator[Master]:
        """Yield a Master for each of this rank's non-empty regions."""
        ...

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (label, tensor) of every replicated tensor; ranks with the same label must agree bit for bit."""
        ...


WEIGHT, FACTOR = "weight", "factor"
AVERAGE = "momentum_encoder"
"""Kind of the moving average of a weight (engines/momentum_encoder.py)."""
QUEUE = "embed.queue"
"""Name of a momentum encoder's queue, the key by which a recipe sets its size."""


Kinds = dict[str, tuple[str, ...]]


Visit = Generator[tuple[ShardRange, str, Tensor], None, None]
