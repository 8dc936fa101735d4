"""Data of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import functional

from samecurve.losses.chunked_cross_entropy import trained_positions
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.data_names import WEIGHT_UNITS


class Counts(NamedTuple):
    """Divisors of a step's losses.

    Attributes:
        trained: number of tokens, rows or pairs that the task's loss sums over (Task.count).
        sequences: number of sequences with a real token (see MicroBatch.real_tokens); only a router loss reads it.
        tokens: number of real tokens; only a router loss reads it.
        units: sum of the weights of what `trained` counts, in 2 ** -24, so that sums over ranks are exact.
    """

    trained: int
    sequences: int
    tokens: int
    units: int

    @property
    def divisor(self) -> float:
        """What the task's loss is divided by: the sum of weights, which is `trained` where nothing has a weight."""
        return self.units / WEIGHT_UNITS

    @classmethod
    def of(cls, batch: MicroBatch, count: Callable[..., int]) -> Counts:
        """Count on the CPU. `count` is Task.count."""
        real = batch.real_tokens()
        trained, weights = count(**batch.targets), batch.targets.get("weights")
        units = trained * WEIGHT_UNITS
        if weights is not None:
            units = int((weights.double() * WEIGHT_UNITS).long()[batch.labels != IGNORE_INDEX].sum())
        return cls(trained, int(real.any(dim=1).sum()), int(real.sum()), units)

    @classmethod
    def of_step(cls, micro_batches: Iterable[MicroBatch], count: Callable[..., int]) -> Counts:
        """Add up the counts of micro-batches, which need not be examined yet."""
        counts = [batch.facts.counts if batch.facts else cls.of(batch, count) for batch in micro_batches]
        return cls(*map(sum, zip(*counts, strict=True)))


class Documents(NamedTuple):
    """Documents of a micro-batch whose rows are concatenated, for attention without a mask.

    Attributes:
        starts: int32 (num_documents + 1,), start of each document and end of the last one.
        longest: upper bound of the tokens of a document, a power of two, so that compiled code meets few of them.
    """

    starts: Tensor
    longest: int

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> Documents:
        """Find the documents as transformers' masks do: by position_ids, or with an attention_mask by the padding."""
        begins = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
        begins[:, 0] = True
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if mask is not None:
            # padding on the left is a document of its own, padding on the right stays with the row's document
            begins.scatter_(1, mask.int().argmax(dim=1, keepdim=True), True)
        elif positions is not None:
            begins[:, 1:] = positions.diff(dim=1) != 1
        starts = functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())
        return cls(starts.int(), 1 << (int(starts.diff().max()) - 1).bit_length())


class BatchFacts(NamedTuple):
    """Facts about a micro-batch that a step needs on the host: reading them from the device waits for queued kernels.

    Attributes:
        counts: of this micro-batch.
        positions: see trained_positions.
        packed: whether two neighbouring position_ids of a row differ by anything but 1, as between two documents; None
            without position_ids.
        padded: whether the attention_mask has a 0; None without an attention_mask.
        documents: see Documents; None: unknown.
        step_sums: sums of `counts` over the step's micro-batches and all ranks, which the loader has started (see
            ControlGroup.start_sum); None: it has not.
    """

    counts: Counts
    positions: Tensor | None
    packed: bool | None
    padded: bool | None
    documents: Documents | None
    step_sums: Future[list[Tensor]] | None = None

    @classmethod
    def of(cls, batch: MicroBatch, count: Callable[..., int]) -> BatchFacts:
        """Examine a micro-batch on the CPU. `count` is Task.count."""
        positions, mask = batch.inputs.get("position_ids"), batch.inputs.get("attention_mask")
        return cls(
            Counts.of(batch, count),
            trained_positions(batch.labels),
            None if positions is None else bool((positions.diff(dim=-1) != 1).any()),
            None if mask is None else not mask.all(),
            Documents.of(batch.inputs),
        )


@dataclass(frozen=True)
class MicroBatch:
    """Data of one forward pass of one rank: tensors (micro_batch_size, ...), most of them with one value per token.

    A row of k sequences gives tensors (micro_batch_size * k, sequence_length), the first row's sequences first. Rows
    that are grouped by length may be shorter; all micro-batches of a step have the same width.

    Attributes:
        inputs: arguments of the model's forward, by name.
        targets: arguments of the task's loss, by name. `labels` is always present, IGNORE_INDEX where nothing is
            trained.
        step: 0-based optimizer step, for dropout.
        places: (rows,) int64 on the CPU, the rows' places in the global batch, for dropout.
        facts: what the loader found out about a training micro-batch; None: not examined.
    """

    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]
    step: int = 0
    places: Tensor | None = None
    facts: BatchFacts | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        return self._each(Tensor.pin_memory)

    def split(self, num_rows: int) -> list[MicroBatch]:
        """Split into views of at most `num_rows` rows each.

        The first axis must be the rows, and the second axis of a 3-D tensor the sequences of a row.
        """
        inputs, targets = _split(self.inputs, num_rows), _split(self.targets, num_rows)
        places = [None] * len(inputs) if self.places is None else self.places.split(num_rows)
        parts = zip(inputs, targets, places, strict=True)
        return [MicroBatch(own_inputs, own_targets, self.step, own) for own_inputs, own_targets, own in parts]

    def first_without_labels(self) -> MicroBatch:
        """Copy the first row with labels that train nothing, not yet examined. The first axis must be the rows."""
        inputs, targets = ({name: t[:1] for name, t in part.items()} for part in (self.inputs, self.targets))
        targets["labels"] = torch.full_like(targets["labels"], IGNORE_INDEX)
        places = None if self.places is None else self.places[:1]
        return replace(self, inputs=inputs, targets=targets, places=places, facts=None)

    def padded(self, num_rows: int, padded_rows: int) -> MicroBatch:
        """Append copies of the first row, with labels that train nothing, from `num_rows` to `padded_rows` rows.

        The result is not examined yet.
        """
        missing = padded_rows - num_rows
        if not missing:
            return self

        def padded(name: str, tensor: Tensor) -> Tensor:
            first = tensor[: len(tensor) // num_rows]  # a row of several sequences has several lines
            first = torch.full_like(first, IGNORE_INDEX) if name == "labels" else first
            return torch.cat([tensor, *[first] * missing])

        inputs, targets = ({n: padded(n, t) for n, t in part.items()} for part in (self.inputs, self.targets))
        places = None if self.places is None else padded("places", self.places)
        return replace(self, inputs=inputs, targets=targets, places=places, facts=None)

    @property
    def labels(self) -> Tensor:
        return self.targets["labels"]

    @property
    def width(self) -> int:
        """Tokens per sequence, with padding."""
        return self.inputs["input_ids"].shape[-1]

    @property
    def is_by_token(self) -> bool:
        """Whether each token has a label, else each row."""
        return self.labels.shape == self.inputs["input_ids"].shape

    def real_tokens(self) -> Tensor:
        """Find the tokens that a router loss counts: bool, (sequences, sequence_length), on the batch's device.

        These are the tokens that the task's loss reads: not the padding, which follows a causal model's last trained
        token, and not a sequence that trains nothing, such as the ones that fill up a rank or a micro-batch.
        """
        ids, trained = self.inputs["input_ids"], self.labels != IGNORE_INDEX
        mask, by_token = self.inputs.get("attention_mask"), self.is_by_token
        if mask is None:
            return trained.flip(1).cummax(dim=1).values.flip(1) if by_token else _rows(trained, ids)
        return mask.bool() & (trained.any(dim=1, keepdim=True) if by_token else _rows(trained, ids))

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        # facts and places stay on the CPU, where they are read
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, targets={name: change(tensor) for name, tensor in self.targets.items()})


def position_ids(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a model's position_ids, (sequences, sequence_length): those given, else 0, 1, 2, ... in each sequence.

    The latter fits because padding comes after the tokens.
    """
    ids = inputs["input_ids"]
    given = inputs.get("position_ids")
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if given is None else given


def _rows(trained: Tensor, ids: Tensor) -> Tensor:
    """Spread a value per row, (rows,), over the tokens of the row's sequences."""
    return trained.repeat_interleave(len(ids) // len(trained))[:, None].expand_as(ids)


def _split(tensors: dict[str, Tensor], num_rows: int) -> list[dict[str, Tensor]]:
    parts = {name: tensor.split(num_rows) for name, tensor in tensors.items()}
    return [
        {name: part.flatten(0, 1) if part.ndim == 3 else part for name, part in zip(parts, together, strict=True)}
        for together in zip(*parts.values(), strict=True)
    ]
