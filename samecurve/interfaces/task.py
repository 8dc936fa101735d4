"""What is trained, as engines and the loop see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from samecurve.losses.cross_entropy import count_trained, token_loss_sum

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
    from transformers.utils import ModelOutput

    from samecurve.config.schema import Recipe
    from samecurve.data.datasets.base import Rows
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine, EvalResult, StepResult
    from samecurve.models.hf_config import Head


class Task(Protocol):
    """held_out: None when the recipe holds nothing out. special_tokens: ids for a from-scratch model's config.

    head: what the model ends in. The keyword arguments of loss, count, statistics and features are the rows' targets by
    name (RowArrays.targets), cut into micro-batches; the logits are what `outputs` gives.

    teacher: a recipe whose model stands frozen beside the trained one; its logits are then among the targets of loss,
    statistics and features, as `teacher`. None: there is none.
    by_token: loss and statistics are sums over trained tokens, and each token's part is found in its own logits and
    targets alone; so they may be taken of some tokens at a time. Such a task has no statistics of a step.
    counts: in a word what `count` counts. num_step_statistics: of how many sums `step_metrics` is made.
    features: (logits, **targets) -> (rows, n), what may be asked of a row beside its loss; None: nothing.
    origin: of data of the hub which split of which commit they are, else "".
    context: features of all rows of an optimizer step, (rows, n) -> what else the loss of each of them has to know, by
    name; the rows are the first axis. Where a task has one, no loss is taken in an evaluation: `metrics` does it, from
    the features of all held-out rows. None: the rows' losses do not depend on one another.

    This is gradient caching (Gao et al., 2021, arXiv:2101.06983) for any such loss. A first pass without gradients
    finds the features of the whole step; `context` takes the loss of all of them together and gives each row its part
    and the gradient with respect to its features; then `loss` is that part plus 0, which has that gradient. So it is
    the loss of the global batch whatever the ranks and micro-batches, for one more forward pass and the memory of the
    features. Gathering features inside of the backward pass would not do: it sees one micro-batch of each rank.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Rows
    held_out: Rows | None
    vocabulary_size: int
    special_tokens: dict[str, int]
    head: Head
    teacher: Recipe | None = None
    features: Callable[..., Tensor] | None = None
    context: Callable[[Tensor], dict[str, Tensor]] | None = None
    has_reference: bool = False
    by_token: bool = False
    counts: str = "tokens"
    origin: str = ""
    num_step_statistics: int = 0

    def outputs(self, found: ModelOutput) -> Tensor:
        """What is wanted of the model's output. A pipeline knows logits only, and does not ask."""
        return found.logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """fp32 scalar: the sum over what is counted, which the engine divides by the step's global count."""
        return token_loss_sum(logits, labels)

    def step_loss(self, logits: Tensor, **targets: Tensor) -> tuple[Tensor, Tensor]:
        """For a training step: the loss, and (num_step_statistics,) sums over the same rows for `step_metrics`."""
        return self.loss(logits, **targets), logits.new_zeros(0)

    def count(self, labels: Tensor) -> int:
        """Over how many tokens, rows or pairs the loss is a sum; `tokens` in results. Rows that fill up are none."""
        return count_trained(labels)

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """1-D: what `metrics` needs beside the loss, to be summed over an evaluation's rows and ranks."""

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """The `eval_*` values of metrics.jsonl."""

    def step_metrics(self, result: StepResult) -> dict[str, float | None]:
        """What a training step adds to its line of metrics.jsonl. None: nothing was trained."""
        return {}

    def prepare(
        self,
        engine: Engine,
        recipe: Recipe,
        skeleton: PreTrainedModel,
        world: ControlGroup,
        alive: Callable[[], None],
        held_out_only: bool = False,
    ) -> None:
        """Once, while the engine's model has the weights that the run begins with, also in a run that goes on.

        What has_reference says that there is: something about those weights that is needed later. Collective. alive: to
        be called as it gets on. held_out_only: nothing is trained.
        """

    def describe(self) -> dict[str, object]:
        """What the data are, for the header and run.json."""

    def write_beside(self, directory: Path, config: PreTrainedConfig) -> None:
        """What else belongs into the exported model's folder. config: the model's."""
