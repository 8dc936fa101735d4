"""Forward passes of a prepared model: losses, statistics and features of micro-batches over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from samecurve.data.micro_batch import Documents
from samecurve.engines.context_parallel import SequencePart, gather_outputs, sum_parts
from samecurve.engines.momentum_encoder import MomentumEncoder
from samecurve.interfaces.engine import EvalResult
from samecurve.interfaces.task import Task
from samecurve.losses.chunked_cross_entropy import TokenSums, trained_positions
from samecurve.losses.cross_entropy import token_loss_sum
from samecurve.losses.token_log_probabilities import LabelLogProbabilities
from samecurve.models import packed_rows
from samecurve.models.attention.mask_facts import MaskFacts, masks_from
from samecurve.models.packed_rows import Gaps

if TYPE_CHECKING:
    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.accelerator.mesh import Mesh
    from samecurve.data.micro_batch import Counts, MicroBatch
    from samecurve.engines.first_step import FirstStep
    from samecurve.engines.router_loss import RouterLoss
    from samecurve.models.dropout import DropoutKeys


@dataclass
class Forward:
    """Forward pass of the torch, ZeRO and evaluation engines.

    Attributes:
        mesh: over which losses are summed and features gathered.
        model: as prepared by the strategy.
        loss_implementation: full, chunked or liger, see loss_implementation.py.
        teacher: the frozen model of a distillation task, else None.
        rows: Batch.micro_batches of a training step; only a cross-batch loss reads them.
        dropout: the keys of the model's dropout; None for an evaluation alone.
        router: the router loss of a mixture of experts, else None.
        first_step: notes the rows of a training step; None for an evaluation alone.
        part: the tokens of each row that this rank computes.
        momentum_encoder: of a task that has one.
    """

    accelerator: Accelerator
    mesh: Mesh
    model: nn.Module
    task: Task
    loss_implementation: str = "full"
    teacher: nn.Module | None = None
    rows: Sequence[Sequence[int]] = ()
    dropout: DropoutKeys | None = None
    router: RouterLoss | None = None
    first_step: FirstStep | None = None
    part: SequencePart = field(default_factory=SequencePart)
    momentum_encoder: MomentumEncoder | None = None

    def __post_init__(self) -> None:
        models = [model for model in (self.model, self.teacher) if model is not None]
        self._recurrent = {model for model in models if packed_rows.install(model)}

    def loss(self, batch: MicroBatch, context: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute Task.step_loss (loss and statistics) of a micro-batch.

        `context` holds the further targets of a cross-batch loss, see `with_contexts`. The gradient contains the router
        loss, the value does not.
        """
        if self.first_step is not None and not self.first_step.is_over:
            self.first_step.read(batch)
        if self.router is None:
            return self._task_loss(batch, context)
        with self.router.recording():
            loss, statistics = self._task_loss(batch, context)
        return loss + self.router.gradient_term(batch), statistics

    def _task_loss(self, batch: MicroBatch, context: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self._takes_sums:
            return self.sums(measure_of(self.task), batch), torch.zeros(0, device=self.accelerator.device)
        logits, targets = self.logits(batch)
        loss, statistics = self.task.step_loss(logits, **targets, **context)
        # each of the ranks that share these rows has the whole loss, and their losses are summed later
        return (loss, statistics) if self.task.by_token else (loss / self.part.count, statistics / self.part.count)

    def sums(self, measure: Callable[..., Tensor], batch: MicroBatch) -> Tensor:
        """Compute the sums that `measure(logits, **targets)` returns for a micro-batch."""
        if not self._takes_sums:
            logits, targets = self.logits(batch)
            return measure(logits, **targets)
        batch = self.part.cut(batch) if self.part.count > 1 else batch
        positions = self._positions(batch)
        batch, targets = self._on_device(batch)
        return self._run(batch, sums=TokenSums(measure, targets, positions))

    @property
    def _takes_sums(self) -> bool:
        """Whether the model returns sums over tokens in place of logits."""
        return self.task.by_token and self.loss_implementation != "full"

    def _positions(self, batch: MicroBatch) -> Tensor | None:
        """The trained tokens of a micro-batch that is still on the host, on the device; None: all tokens."""
        positions = batch.facts.positions if batch.facts else trained_positions(batch.labels)
        return None if positions is None else positions.to(self.accelerator.device, non_blocking=True)

    def logits(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Compute what the task's loss takes for logits, of this rank's tokens; return it with the targets, see Task.

        These are the labels' log-probabilities for a task by log-probability, unless its loss is full.
        """
        if not self.task.by_log_probability or self.loss_implementation == "full":
            return self._whole_logits(batch)
        own = self.part.cut(batch) if self.part.count > 1 else batch
        positions = self._positions(own)
        own, targets = self._on_device(own)
        return self._run(own, sums=LabelLogProbabilities(targets["labels"], positions)), self._with_sum(targets)

    def _whole_logits(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Compute the logits (Task.outputs) of this rank's tokens; return them with their targets on the device.

        Where labels are per row instead of per token, the logits of whole rows are gathered.
        """
        own, targets = self._on_device(self.part.cut(batch) if self.part.count > 1 else batch)
        logits = self.task.outputs(self._run(own))
        if not batch.is_by_token:
            return self._gathered(logits, batch), targets
        return logits, self._with_sum(targets)

    def _with_sum(self, targets: dict[str, Tensor]) -> dict[str, Any]:
        """Add `sum_parts` to the targets of a task that needs it, see Task."""
        if self.part.count == 1 or self.task.by_token:
            return targets
        return {**targets, "sum_parts": partial(sum_parts, mesh=self.mesh)}

    def _run(self, batch: MicroBatch, **options: TokenSums | LabelLogProbabilities) -> Any:
        """Run the model, in training with the dropout of the batch's rows."""
        drops = nullcontext()
        if self.dropout is not None and self.dropout.is_needed and batch.places is not None:
            drops = self.dropout.micro_batch(batch)
        with drops, masks_from(_mask_facts(batch)):
            return self.model(**self._inputs(self.model, batch), **options)

    def _inputs(self, model: nn.Module, batch: MicroBatch) -> dict[str, Any]:
        return {**batch.inputs, **(gaps_of(batch) if model in self._recurrent else {})}

    def _route(self, batch: MicroBatch) -> None:
        """Run the model for its routers alone: without a teacher and, where the head is chunked, without the head."""
        batch, options = batch.to(self.accelerator.device), {}
        if self.loss_implementation != "full":
            no_position = torch.zeros(0, dtype=torch.long, device=self.accelerator.device)
            options["sums"] = TokenSums(token_loss_sum, {"labels": batch.labels}, no_position)
        self._run(batch, **options)

    def _on_device(self, batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        batch = batch.to(self.accelerator.device)
        if self.teacher is None:
            return batch, batch.targets
        with torch.no_grad(), masks_from(_mask_facts(batch)):
            return batch, batch.targets | {"teacher": self.teacher(**self._inputs(self.teacher, batch)).logits}

    def with_contexts(
        self, micro_batches: Sequence[MicroBatch], counts: Counts
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor], bool]]:
        """Yield (micro-batch, context, whether it is the last one).

        The context holds per-row targets that depend on the step's other rows (GradCache, see Task); {} for most tasks.
        `counts` are those of the whole step.
        """
        if self.router is not None:
            self.router.begin(micro_batches, counts, self._route)
        contexts: list[dict[str, Tensor]] = [{}] * len(micro_batches)
        if self.task.context is not None:
            padded_rows = most_rows(self.rows)
            # drops the same values as the pass with gradients
            compute = partial(self._features, micro_batches, padded_rows)
            contexts = task_contexts(self.task, compute, self.rows, self.mesh.shard[0], encoder=self.momentum_encoder)
        for index, (batch, context) in enumerate(zip(micro_batches, contexts, strict=True), start=1):
            yield batch, context, index == len(micro_batches)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See Engine.evaluate."""
        if self.task.context is not None:
            return EvalResult(math.nan, self.count(micro_batches).trained, features=self.features(micro_batches))
        # one value, which broadcasts to as many as the measure returns
        measure, count, sums = partial(evaluation_sums, self.task), 0, torch.zeros(1, device=self.mesh.device)
        self.model.eval()
        with torch.no_grad():
            for batch in micro_batches:
                count += self.task.count(**batch.targets)
                sums = sums + self.sums(measure, batch)
        self.model.train()
        loss, *statistics, tokens = self.mesh.sum(torch.cat([sums, sums.new_tensor([count])]))
        # the ranks that share rows have each counted whole ones
        tokens, shares = int(tokens) // self.part.count, 1 if self.task.by_token else self.part.count
        loss, statistics = loss / shares, [value / shares for value in statistics]
        return EvalResult(loss=loss / max(tokens, 1), tokens=tokens, statistics=tuple(statistics))

    def outputs(self, batch: MicroBatch, positions: Tensor | None = None) -> Tensor | None:
        """See Engine.outputs."""
        self.model.eval()
        with torch.no_grad():
            outputs = self._whole_logits(batch)[0]
            outputs = self._gathered(outputs, batch) if batch.is_by_token else outputs
        self.model.train()
        return at_positions(outputs, positions).float().cpu() if self.accelerator.is_main_process else None

    def _gathered(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        return gather_outputs(outputs, self.part, self.mesh, batch.inputs["input_ids"].shape[1])

    def features(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """See Engine.features."""
        self.model.eval()
        features = self._features(micro_batches)
        self.model.train()
        return features.cpu()

    def _features(self, micro_batches: Iterable[MicroBatch], padded_rows: int = 0) -> Tensor:
        """Features gathered over all ranks."""
        return self.mesh.gather(task_features(self.task, self.logits, micro_batches, padded_rows))

    def count(self, micro_batches: Sequence[MicroBatch]) -> Counts:
        """Count a step over all ranks. Collective."""
        return self.mesh.count(micro_batches, self.task.count)


def _mask_facts(batch: MicroBatch) -> MaskFacts:
    facts, positions = batch.facts, batch.inputs.get("position_ids")
    if facts is None:
        return MaskFacts(positions=positions)
    starts, longest = facts.documents or (None, 0)
    return MaskFacts(facts.packed, facts.padded, starts, longest, positions)


def gaps_of(batch: MicroBatch) -> dict[str, Gaps]:
    """Return the argument that separates a micro-batch's documents (packed_rows.install); none if it has no packed row.

    Rows that the loader has not examined are read from the device.
    """
    positions, facts = batch.inputs.get("position_ids"), batch.facts
    if positions is None or (facts is not None and not facts.packed):
        return {}
    documents = facts.documents if facts is not None and facts.documents else Documents.of(batch.inputs)
    gaps = Gaps.of(documents.starts, positions.shape)
    return {"gaps": gaps._replace(places=gaps.places.to(positions.device, non_blocking=True))}


def measure_of(task: Task) -> Callable[..., Tensor]:
    """Return the task's loss: token_loss_sum itself if inherited, which VocabularyColumns recognizes by identity."""
    inherited = getattr(task.loss, "__func__", None) is Task.loss
    return token_loss_sum if inherited else task.loss


def evaluation_sums(task: Task, logits: Tensor, **targets: Tensor) -> Tensor:
    """Compute the task's loss and statistics over some rows or tokens, without their weights: fp64, (1 + n,)."""
    targets.pop("weights", None)
    loss = task.loss(logits, **targets).double().reshape(1)
    return torch.cat([loss, task.statistics(logits, **targets).double()])


def at_positions(outputs: Tensor, positions: Tensor | None) -> Tensor:
    """Select the outputs of one token per row, (rows, ...), from (rows, tokens, ...). positions: see Engine.outputs."""
    return outputs if positions is None else outputs[torch.arange(len(outputs)), positions]


FeatureForward = Callable[["MicroBatch"], tuple[Tensor, dict[str, Tensor]]]


@torch.no_grad()
def task_features(
    task: Task, forward: FeatureForward, micro_batches: Iterable[MicroBatch], padded_rows: int = 0
) -> Tensor:
    """Compute the features of this rank's rows.

    Args:
        forward: returns a micro-batch's (logits, targets).
        micro_batches: of this rank.
        padded_rows: pad each micro-batch's features with zeros to this many rows, so that all ranks have as many.

    Returns:
        (rows, n), fp32.
    """
    assert task.features is not None  # only tasks with features come here
    features_of_batches = []
    for batch in micro_batches:
        logits, targets = forward(batch)
        rows = task.features(logits, **targets).float()
        features_of_batches.append(functional.pad(rows, (0, 0, 0, max(padded_rows - len(rows), 0))))
    return torch.cat(features_of_batches)


def task_contexts(
    task: Task,
    compute: Callable[[], Tensor],
    rows: Sequence[Sequence[int]],
    rank: int,
    padded: bool = False,
    encoder: MomentumEncoder | None = None,
) -> list[dict[str, Tensor]]:
    """Compute Task.context of a step, one for each micro-batch of a rank. Rows that train nothing get zeros.

    Args:
        compute: returns the features of all ranks' micro-batches, each padded to the largest one's rows:
            (ranks * micro-batches * rows, n).
        rows: Batch.micro_batches.
        rank: the data-parallel rank.
        padded: give every micro-batch as many rows as the largest one has, as pipelines pad their inputs.
        encoder: of a task with a momentum queue.
    """
    assert task.context is not None  # only tasks with a cross-batch loss come here
    most, count = most_rows(rows), len(rows[0])
    real = [nth * most + row for nth, size in enumerate(chain(*rows)) for row in range(size)]
    features = compute()
    places = torch.tensor(real).to(features.device, non_blocking=True)  # a list as an index would wait for the device
    if encoder is None:
        context = task.context(features[places])
    else:
        with encoder.in_place_of_the_weights():
            keys = compute()[places]
        context = task.context(features[places], keys=keys, queue=encoder.queue)
        encoder.hold(context.pop("queued"))
    by_batch: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, value in context.items():
        whole = value.new_zeros(len(features), *value.shape[1:])
        whole[places] = value
        for targets, part, size in zip(by_batch, whole.chunk(len(rows))[rank].chunk(count), rows[rank], strict=True):
            targets[name] = part if padded else part[: max(size, 1)]  # a micro-batch without rows reads a padding row
    return by_batch


def most_rows(rows: Sequence[Sequence[int]]) -> int:
    """Return the rows of the largest micro-batch. rows: Batch.micro_batches."""
    return max(chain(*rows))
