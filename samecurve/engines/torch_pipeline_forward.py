"""Forward passes through a pipeline's stages without an update: evaluations, features, outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samecurve.engines.forward import at_positions, evaluation_sums
from samecurve.interfaces.engine import EvalResult
from samecurve.models.hf_config import output_shape
from samecurve.strategy.parallel_dims import BATCH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.mesh import Mesh
    from samecurve.data.micro_batch import Counts, MicroBatch
    from samecurve.engines.teacher import StagedTeacher
    from samecurve.engines.torch_pipeline_stages import HeadChunks, LocalStages
    from samecurve.interfaces.task import Task
    from samecurve.models.dropout import DropoutKeys


@dataclass
class TorchPipelineForward:
    """Forward passes of this rank's stages. Every method but `targets` is collective.

    Attributes:
        module: the layers of all of this rank's stages.
        skeleton: the model on the meta device.
        chunks: what the last stage returns instead of logits; None: logits.
        teacher: of a distillation task, else None.
    """

    stages: LocalStages
    module: nn.Module
    mesh: Mesh
    skeleton: PreTrainedModel
    task: Task
    dropout: DropoutKeys
    chunks: HeadChunks | None
    teacher: StagedTeacher | None

    def count(self, micro_batches: Sequence[MicroBatch]) -> Counts:
        """Count the tokens (or other units, see Task.count) of the micro-batches over all ranks."""
        return self.mesh.count(micro_batches, self.task.count)

    def with_teacher(self, batch: MicroBatch) -> MicroBatch:
        """Run the teacher, if there is one, see StagedTeacher.with_hidden."""
        return self.teacher.with_hidden(batch) if self.teacher else batch

    def targets(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Return what the task's loss takes beside the outputs of a batch that `with_teacher` returned."""
        return self.teacher.targets(batch) if self.teacher else batch.targets

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See Engine.evaluate."""

        def measure(output: Tensor, **targets: Tensor) -> Tensor:
            has_sums = self.chunks is not None and self.chunks.has_sums
            return (output if has_sums else evaluation_sums(self.task, output, **targets))[None]

        tokens = self.count(micro_batches).trained
        if self.task.context is not None:
            return EvalResult(math.nan, tokens, features=self.features(micro_batches).cpu())
        sums = self._on_last_stage(micro_batches, measure).sum(dim=0)
        loss, *statistics = self.mesh.sum(sums, over=BATCH)
        return EvalResult(loss=loss / max(tokens, 1), tokens=tokens, statistics=tuple(statistics))

    def features(self, micro_batches: Sequence[MicroBatch], drops: bool = False) -> Tensor:
        """See Engine.features, but on the device. `drops`: apply the dropout of the step whose keys are queued."""
        assert self.task.features is not None  # only tasks with features come here
        return self.mesh.gather(self._on_last_stage(micro_batches, self.task.features, drops).float())

    def _on_last_stage(
        self, micro_batches: Sequence[MicroBatch], measure: Callable[..., Tensor], drops: bool = False
    ) -> Tensor:
        """Apply `measure`, (logits, **targets) -> (rows, n), to this pipeline's micro-batches without an update.

        With `chunks`, `measure` gets what they say instead of logits.

        Returns:
            (rows of all micro-batches, n), fp64, the same on every rank of the pipeline.
        """
        values_of_batches = []
        for nth, batch in enumerate(micro_batches):
            batch = self.with_teacher(batch.to(self.mesh.device))
            if drops:
                self.dropout.use(nth)
            output = self._run(batch, batch.labels if self.chunks else None, drops)
            if output is not None:
                values_of_batches.append(measure(output, **self.targets(batch)).double())
        own = torch.cat(values_of_batches) if values_of_batches else torch.zeros(0, 0, device=self.mesh.device)
        shape = [int(size) for size in self.mesh.sum(torch.tensor(own.shape), over=("pp",))]
        values = own if values_of_batches else own.new_zeros(shape, dtype=torch.float64)
        self.mesh.add([values], over=("pp",))  # only the last stage has values
        return values

    def outputs(self, batch: MicroBatch, positions: Tensor | None = None) -> Tensor | None:
        """See Engine.outputs."""
        batch = batch.to(self.mesh.device)
        logits, last = self._run(batch), self.stages.global_rank(self.stages.count - 1)
        if 0 not in self.stages.peers:  # the other pipelines compute the same
            return None
        if last == 0:
            return at_positions(logits, positions).float().cpu() if logits is not None else None
        if logits is not None:
            dist.send(logits.float().contiguous(), dst=0)
        if self.mesh.rank != 0:
            return None
        received = torch.empty(output_shape(self.skeleton, batch.inputs["input_ids"]), device=self.mesh.device)
        dist.recv(received, src=last)
        return at_positions(received, positions).cpu()

    def _run(self, batch: MicroBatch, labels: Tensor | None = None, drops: bool = False) -> Tensor | None:
        self.module.train(drops)
        output = self.stages.forward(batch, self.skeleton.config.hidden_size, labels)
        self.module.train()
        return output
