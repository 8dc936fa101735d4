"""Checks that stop a run after numerical faults. All ranks decide alike."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import torch

from samecurve.errors import DataError, NumericError

if TYPE_CHECKING:
    from samecurve.config.schema import Numerics as Settings
    from samecurve.data.batches import StepBatches
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine, StepResult
    from samecurve.run.run_directory import RunDirectory

MOST_ROLLBACKS = 3


class Guard:
    """Numerical checks of each optimizer step, of loss spikes and of replicated weights."""

    def __init__(self, settings: Settings, run: RunDirectory, world: ControlGroup):
        self._settings, self._run, self._world = settings, run, world
        self._skipped_in_a_row = self._rollbacks = 0
        self._first_skipped = self._num_tokens = 0

    def check(self, step: int, result: StepResult, batches: StepBatches) -> None:
        """Record a refused step and its rows in skipped.jsonl.

        Only an applied update ends a series of refused steps: a step without trained tokens or with an fp16 overflow
        shows nothing about the weights.

        Raises:
            NumericError: more than numerics.max_skipped_steps steps were refused in a row.
        """
        self._num_tokens += result.tokens
        if result.applied:
            self._skipped_in_a_row = 0
        if not result.refused:
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == 1:
            self._first_skipped = step
        self._write(step, result, result.refused, batches)
        if self._skipped_in_a_row > self._settings.max_skipped_steps:
            raise NumericError(
                f"step {step}: {result.refused}; the step was not applied and the weights are unchanged. "
                f"That is {self._skipped_in_a_row} skipped steps in a row, and numerics.max_skipped_steps is "
                f"{self._settings.max_skipped_steps}; the rows are in {self._run.path / 'skipped.jsonl'}"
            )

    @property
    def is_pending(self) -> bool:
        """Whether steps were refused and none was applied since, so that the weights may be bad.

        No checkpoint is written in this state. A resumed run repeats these steps and counts them again.
        """
        return self._skipped_in_a_row > 0

    def check_last(self, step: int, updates: int) -> None:
        """Check the end of the run, after the last step and before its checkpoint.

        Args:
            step: number of the last step.
            updates: number of updates applied to the weights, earlier sessions included.

        Raises:
            NumericError: the last steps were refused, however few (no later step can show whether their rows or the
                weights are bad), or no step was applied.
            DataError: no row had a trained token.
        """
        if self._skipped_in_a_row:
            good = self._first_skipped - 1
            raise NumericError(
                f"no step after step {good} was applied, and the run ends here: no later step shows whether the "
                "weights are still good, so they are not exported. Lower optimizer.learning_rate, or correct the rows "
                f"in {self._run.path / 'skipped.jsonl'}"
            )
        if updates:
            return
        if not self._num_tokens:
            raise DataError(
                f"none of the rows of {step} steps has a trained token, so nothing was trained; python -m samecurve "
                "inspect shows what is trained in each row"
            )
        raise NumericError(
            f"none of {step} steps was applied: the gradients of all of them were out of fp16's range, and the loss "
            "scale is still being lowered; train more steps, or set precision to bf16 or fp32"
        )

    def spiked(self, step: int, result: StepResult, smoothed_loss: float | None, batches: StepBatches) -> bool:
        """Whether the loss exceeds the smoothed loss so far that the run should roll back to a checkpoint's weights.

        After Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, section 5.1): the run continues with the weights from
        before the spike and the rows after it.

        Args:
            step: number of the step, from 1.
            result: result of the step.
            smoothed_loss: smoothed loss before the step, in nats; None while there is none.
            batches: asked which rows the step read, for skipped.jsonl.

        Raises:
            NumericError: MOST_ROLLBACKS roll-backs in a row have not helped.
        """
        ratio = self._settings.rollback_ratio
        if ratio is None or smoothed_loss is None or result.refused or result.tokens == 0:
            return False
        if not result.loss > ratio * smoothed_loss:
            self._rollbacks = 0
            return False
        self._rollbacks += 1
        reason = f"the loss is {result.loss:.6g}, {result.loss / smoothed_loss:.2f} times the smoothed one"
        self._write(step, result, reason, batches)
        if self._rollbacks > MOST_ROLLBACKS:
            raise NumericError(
                f"step {step}: {reason}, after {MOST_ROLLBACKS} roll-backs in a row; lower optimizer.learning_rate, or "
                f"correct the rows in {self._run.path / 'skipped.jsonl'}"
            )
        return True

    def compare_replicas(self, step: int, engine: Engine) -> bool:
        """Compare the copies of replicated weights every numerics.compare_replicas_every_steps steps. Collective.

        Returns:
            Whether the comparison ran at this step.

        Raises:
            NumericError: copies differ; the message names the differing ranks. Raised on all ranks.
        """
        every = self._settings.compare_replicas_every_steps
        if not every or step % every:
            return False
        # a generator, so that only one copy is in host memory at a time
        replicas = ((label, tensor.detach().contiguous().cpu()) for label, tensor in engine.state.replicas())
        # of the bytes, because numpy has no bf16
        own = {
            label: hashlib.sha256(copy.view(-1).view(torch.uint8).numpy().data).hexdigest() for label, copy in replicas
        }
        differing = self._world.conclude(own, _differing)
        if differing:
            listed = "\n".join(f"  rank {rank}: {len(labels)} differ, first {labels[0]}" for rank, labels in differing)
            raise NumericError(
                f"step {step}: replicated weights differ between ranks, so a rank computed or stored something wrong "
                f"(memory, device, network); resume from the last checkpoint without its machine\n{listed}"
            )
        return True

    def _write(self, step: int, result: StepResult, reason: str, batches: StepBatches) -> None:
        # as text, which tells nan from inf: JSON has neither, and both would become null
        record = {"step": step, "reason": reason, "loss": str(result.loss), "grad_norm": str(result.grad_norm)}
        self._run.append_skipped(record | {"rows": batches.rows_of(step - 1).tolist()})  # rows_of counts from 0


def _differing(of_all: list[dict[str, str]]) -> list[tuple[int, list[str]]]:
    """List (rank, labels of tensors that differ from the majority's). Where no majority agrees, all are listed."""
    differing = []
    labels_of_all = {label for own in of_all for label in own}
    values = {label: Counter(own[label] for own in of_all if label in own) for label in labels_of_all}
    for rank, own in enumerate(of_all):
        labels = [label for label, digest in own.items() if 2 * values[label][digest] <= values[label].total()]
        if labels:
            differing.append((rank, labels))
    return differing
