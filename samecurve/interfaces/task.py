"""The interface of a training task to the engines and the training loop, and the identity of its model and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from samecurve.losses.cross_entropy import count_trained, token_loss_sum
from samecurve.storage.atomic import json_values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from samecurve.config.schema import Recipe
    from samecurve.data.datasets.base import Rows
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import EvalResult, StepResult
    from samecurve.specs.heads import Head


class FeatureEngine(Protocol):
    """The part of an Engine that computes features."""

    @property
    def shard(self) -> tuple[int, int]: ...

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor: ...


@dataclass(frozen=True)
class InitialState:
    """A run before its first step, for Task.prepare.

    Attributes:
        engine: engine whose model has the run's initial weights.
        recipe: the whole recipe.
        skeleton: the model on the meta device.
        world: control group of all ranks.
        report_progress: called for each micro-batch, for the watchdog.
        validation_only: whether nothing is trained, so that only the validation rows are needed.
    """

    engine: FeatureEngine
    recipe: Recipe
    skeleton: PreTrainedModel
    world: ControlGroup
    report_progress: Callable[[], None]
    validation_only: bool = False


class MomentumQueue(NamedTuple):
    """A queue of `size` embeddings of a momentum encoder, which keeps the share `momentum` of itself in a step."""

    size: int
    momentum: float


class Task(Protocol):
    """Data, loss and metrics of a training run.

    The keyword arguments of loss, count, statistics and features are the rows' targets by name (RowArrays.targets), cut
    into micro-batches. Their logits are the result of `outputs`. Where ranks have parts of the rows (context
    parallelism), a loss that has labels per token and yet is not by token also gets `sum_parts`, which adds up sums
    over a row's tokens.

    A task with a cross-batch loss (each row's loss depends on other rows of the optimizer step) defines `context` and
    trains with gradient caching (Gao et al., 2021, arXiv:2101.06983). A first pass without gradients computes the
    features of the whole step. `context` computes the loss over all of them and returns each row's share and the
    gradient with respect to its features. `loss` then returns that share plus a zero term with that gradient. The
    result is the loss of the global batch, independent of ranks and micro-batches, at the cost of one more forward pass
    and of the memory for the features. Gathering features inside the backward pass would not suffice, because that
    pass sees only one micro-batch of each rank.

    Attributes:
        train: the training rows.
        validation: the validation rows; None if the recipe has none.
        special_tokens: token ids for the config of a model trained from scratch.
        head: the model's output head.
        teacher: recipe of a frozen model that runs alongside the trained one. Its logits are passed to loss,
            statistics and features as the target `teacher`. None without a teacher.
        features: (logits, **targets) -> (rows, n), per-row outputs other than the loss; None if the task has none.
        context: (rows, n) features of all rows of an optimizer step -> further targets of `loss` by name, with rows as
            the first axis. Evaluation then computes no loss; `metrics` derives it from the features of all
            validation rows. None if rows' losses are independent.
        momentum_queue: of a task with a momentum encoder. `context` then also takes that encoder's features of the same
            rows as `keys`, and the newest of what it has returned as "queued", (any number, width), as `queue`.
        has_reference: whether `prepare` computes something from the initial weights that training needs later.
        by_token: whether loss and statistics are sums over trained tokens, each computed from its own logits and
            targets alone, so that they can be computed in chunks of tokens. Such a task has no step statistics.
        by_log_probability: whether loss, statistics and features need of the logits only each label's log-probability.
            In place of logits they also take those, (rows, length), fp32, 0 where nothing is trained.
        counts: plural noun for the unit of `count`.
        origin: split and commit of a dataset from the Hugging Face Hub, else "".
        bad_rows: files with the rows that were dropped because they cannot be used.
        num_step_statistics: number of sums that `step_loss` returns for `step_metrics`.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Rows
    validation: Rows | None
    vocabulary_size: int
    special_tokens: dict[str, int]
    head: Head
    teacher: Recipe | None = None
    features: Callable[..., Tensor] | None = None
    context: Callable[..., dict[str, Tensor]] | None = None
    momentum_queue: MomentumQueue | None = None
    has_reference: bool = False
    by_token: bool = False
    by_log_probability: bool = False
    counts: str = "tokens"
    origin: str = ""
    bad_rows: Sequence[Path] = ()
    num_step_statistics: int = 0

    def outputs(self, output: Any) -> Tensor:
        """Select the tensor that loss and features need from the model's output. Pipelines always use the logits."""
        return output.logits

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the loss over the counted units, in training times the weights of tokens if the rows have some.

        Returns an fp32 scalar, which the engine divides by the step's global count, or sum of weights.
        """
        return token_loss_sum(logits, labels, weights)

    def step_loss(self, logits: Tensor, **targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a training step and (num_step_statistics,) sums over the same rows for `step_metrics`."""
        return self.loss(logits, **targets), logits.new_zeros(0)

    def count(self, labels: Tensor, weights: Tensor | None = None) -> int:
        """Count the tokens, rows or pairs that the loss sums over (`tokens` in results), without padding rows."""
        return count_trained(labels)

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the 1-D sums that `metrics` needs besides the loss; the engine adds them over rows and ranks."""
        return logits.new_zeros(0)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Compute the `eval_*` values of metrics.jsonl."""
        ...

    def step_metrics(self, result: StepResult) -> dict[str, float | None]:
        """Compute the task's own values for the step's line of metrics.jsonl; None if nothing was trained."""
        return {}

    def prepare(self, start: InitialState) -> None:
        """Compute what the task needs from the initial weights (see has_reference). Collective.

        Called once, while the engine's model has the run's initial weights, also before a checkpoint is loaded.
        """

    def describe(self) -> dict[str, object]:
        """Describe the data, for the header and run.json."""
        ...

    def save_task_files(self, directory: Path, config: PreTrainedConfig) -> None:
        """Write the task's further files into the exported model's folder. `config` is the model's."""


# what an export or another version of transformers writes differently for the same architecture
_NOT_ARCHITECTURE = frozenset("_name_or_path transformers_version dtype torch_dtype architectures use_cache".split())


def identity(config: PreTrainedConfig, task: Task) -> dict:
    """Collect the architecture's configuration and the rows' fingerprint."""
    fields = json_values(config.to_dict())  # as read back from state.json: id2label's integer keys become strings
    kept = {key for key in fields if key not in _NOT_ARCHITECTURE and "attn_implementation" not in key}
    data = {"rows": task.train.fingerprint, "vocabulary_size": task.vocabulary_size}
    if task.origin:
        data["hub"] = task.origin  # part of the fingerprint, too; repeated here to show the commit
    if task.train.shares:
        data["shares"] = list(task.train.shares)  # part of the fingerprint, too; repeated here to show a difference
    return {"model": {key: fields[key] for key in kept}, "data": data}
