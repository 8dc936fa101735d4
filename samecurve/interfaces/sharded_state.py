"""A rank's part of weights and optimizer state, as ranges of flattened tensors."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class Held(NamedTuple):
    """A rank's range [start, stop) of the flattened parameter `name`, and the part of it that this rank saves.

    Of a range that several ranks hold, each saves a part, or one saves all and the others an empty one.
    """

    name: str
    start: int
    stop: int
    save_start: int
    save_stop: int


class State(Protocol):
    kinds: Kinds
    """By name of every parameter: what there is of it, WEIGHT and then the optimizer's states of its shape. By
    "parameter.state" of every one of another shape: FACTOR."""
    factors: dict[str, tuple[int, ...]]
    """Full shape by name of the latter."""
    codes: Container[tuple[str, str]]
    """(name, kind) of what is uint8; all else is fp32, or bf16."""

    def held(self) -> list[Held]:
        """This rank's ranges, none of them empty, in the order in which `visit` comes to them."""

    def visit(self, writing: bool = False) -> Visit:
        """Every range under each of its kinds in turn: a live tensor (stop - start,), until the next one comes.

        writing: what the caller writes into the tensors is kept.
        """

    def finish(self, updates: int) -> None:
        """After writing: the optimizer's counter, and whatever is computed from the weights. Collective."""

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        """(label, tensor) of what every rank with the same label holds bit for bit."""


WEIGHT, FACTOR = "weight", "factor"


Kinds = dict[str, tuple[str, ...]]


Visit = Generator[tuple[Held, str, Tensor], None, None]
