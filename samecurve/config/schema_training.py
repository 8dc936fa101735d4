"""The recipe's schema, continued: batch, optimizer, schedule, loss and memory.

The text below each key is its meaning in docs/recipe_reference.md, which scripts/pages/recipe_reference.py writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WrapValidator

from samecurve.config.section import LARGEST_INTEGER, Count, Name, Natural, Section, name_or_import_path
from samecurve.specs.optimizers import OptimizerName

AUTO = "auto"


def _number_or_auto(value: object, as_number: Callable[[object], object]) -> object:
    """Accept a number or "auto". The two as a union would report a problem for each of its members."""
    return value if value == AUTO else as_number(value)


if TYPE_CHECKING:
    MicroBatchSize = int  # what a run reads: a rehearsal puts a number in the place of auto before anything is built
else:
    MicroBatchSize = Annotated[Count, WrapValidator(_number_or_auto)]


class Batch(Section):
    """Sizes in global terms, so that the loss curve does not depend on the number of devices."""

    global_batch_size: Count = 32
    """Rows per optimizer step over all devices. Any number of devices shares them, as evenly as possible."""
    micro_batch_size: MicroBatchSize = 1
    """Maximum number of rows per device and forward pass: as many as fit into memory. It need not divide anything.
    `auto` finds the number by rehearsals before the first step, on a CPU within `memory.limit_gib`."""
    sequence_length: Count = 1024
    """Tokens per row."""

    @property
    def is_auto(self) -> bool:
        """Whether micro_batch_size has to be found first; no other method but rows_per_rank works before that."""
        return self.micro_batch_size == AUTO

    def rows_per_rank(self, data_parallel_size: int) -> list[int]:
        """Rows of a step that each data-parallel rank reads: 32 rows on 7 ranks are 5, 5, 5, 5, 4, 4, 4."""
        share, more = divmod(self.global_batch_size, data_parallel_size)
        return [share + (rank < more) for rank in range(data_parallel_size)]

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Micro-batches per optimizer step, the same number on each rank because their collectives must match."""
        return -(-self.rows_per_rank(data_parallel_size)[0] // self.micro_batch_size)

    def micro_batches(self, data_parallel_size: int) -> list[list[int]]:
        """Rows of each micro-batch of a step, for each rank; 0 where a rank takes part without a row to train.

        Full micro-batches come first: 32 rows with micro_batch_size 7 on one device are 7, 7, 7, 7, 4.
        """
        starts = range(0, self.accumulation_steps(data_parallel_size) * self.micro_batch_size, self.micro_batch_size)
        return [
            [min(max(rows - start, 0), self.micro_batch_size) for start in starts]
            for rows in self.rows_per_rank(data_parallel_size)
        ]


DEFAULT_WARMUP_RATIO = 0.05


def num_warmup_steps(steps: int, warmup_steps: int | None, warmup_ratio: float | None) -> int:
    """Steps of warm-up: as given, else a share of the run's steps.

    Rounded up as in transformers' TrainingArguments.get_warmup_steps, but at least the last step comes after it.
    """
    if warmup_steps is not None:
        return warmup_steps
    ratio = DEFAULT_WARMUP_RATIO if warmup_ratio is None else warmup_ratio
    return min(math.ceil(steps * ratio), steps - 1)


Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


class ParameterGroup(Section):
    """Parameters that are trained otherwise than the rest, or not at all."""

    pattern: Name
    """Shell pattern (`*`, `?`, `[0-9]`) of parameter names as in a checkpoint. It may begin at any part of a name:
    `layers.0.*` matches all of the first layer, whatever stands before `layers`. `*` matches dots, too."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Their peak learning rate, in place of `optimizer.learning_rate`. The schedule scales both alike."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Their weight decay, in place of `optimizer.weight_decay`, for those of them that decay."""
    frozen: bool = False
    """Keep their initial values: no gradients, no optimizer state, and no place in checkpoints."""

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a parameter's name, or that of an adapter's matrix in peft's file."""
        names = (name, name.replace(".default.", "."))
        return any(fnmatchcase(one, start + self.pattern) for one in names for start in ("", "*."))


class Optimizer(Section):
    """The optimizer and its hyperparameters. A key that the named optimizer does not read is an error."""

    name: Annotated[OptimizerName, WrapValidator(name_or_import_path)] = "adamw"
    """The algorithm. [Optimizers](optimizers.md) compares them. Or the import path `module:Class` of a subclass of
    `torch.optim.Optimizer`, see [Extending](extending.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of an optimizer that is named by its import path, besides `lr`."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """The peak learning rate. Lion needs 3 to 10 times less than AdamW; for Adafactor it is relative to the weights."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of the two moments. Not read by `sgd` and `adafactor`. 0.95 suits short runs of language models
    better than 0.999."""
    momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum of `sgd` and `muon`. The authors of Muon use 0.95."""
    epsilon: float = Field(default=1e-8, gt=0, lt=1)
    """Added to the denominator of the AdamW variants, including the one inside `muon`."""
    bf16_rounding: Literal["stochastic", "kahan"] = "stochastic"
    """How `adamw_bf16` updates a bf16 weight: stochastic rounding, or Kahan summation with 2 more bytes per weight."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """`adamw` only: one kernel per update, one per operation, or one per operation and tensor."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices, embeddings, convolutions and experts; [no others](optimizers.md#weight-decay)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Learning rates and weight decays of some parameters, and [frozen ones](optimizers.md#parameter-groups). The first
    group whose pattern matches a parameter counts."""

    def group_of(self, name: str) -> ParameterGroup | None:
        """Return the group of a parameter, None for one without any."""
        return next((group for group in self.groups if group.matches(name)), None)

    @property
    def freezes(self) -> bool:
        return any(group.frozen for group in self.groups)


class Schedule(Section):
    """The learning rate as a function of the step."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """The shape after warm-up. `wsd` is warm-up, stable, decay."""
    warmup_steps: Natural | None = None
    """Steps of linear warm-up, fewer than `steps`; or give `warmup_ratio`."""
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """Linear warm-up as a share of `steps`, rounded up. null: 0.05, unless `warmup_steps` is given."""
    warmup_type: Literal["linear", "log"] = "linear"
    """How the rate grows during warm-up: evenly, or by the logarithm of the step, as in DeepSpeed's schedulers."""
    decay_steps: Natural | None = None
    """`wsd` only, and required there: the length of the final decay in steps."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The last learning rate divided by the peak."""
    delay_steps: int = Field(default=0, ge=0, le=LARGEST_INTEGER)
    """Steps by which warm-up and decay come later. 1 gives the rates of transformers' schedules, whose first step of a
    warm-up has the rate 0."""


class Loss(Section):
    """Computation of the loss over tokens. The other tasks have losses over rows or pairs."""

    implementation: Literal["auto", "chunked", "full", "liger"] = "auto"
    """`chunked` runs output head and loss on a few tokens at a time; `full` materializes all logits; `liger` uses
    liger-kernel's fused linear cross-entropy on a GPU. `auto` is `chunked` where task and strategy allow it."""


class Memory(Section):
    """Kept activations, the moment of gradient reduction, Python's garbage collection, and the memory limit."""

    activation_checkpointing: Literal["none", "full", "selective", "every_n_layers", "offload"] = "none"
    """What the backward pass computes again instead of keeping it. `full`: each layer from its input, about a third
    more work; `every_n_layers`: one layer in that many; `selective`: all but the results of some operators; `offload`:
    as `full`, with the inputs in host memory."""
    selective_save: Literal["matmul", "attention"] = "matmul"
    """`selective` only: keep the results of matrix products and attention, or of attention alone (long sequences)."""
    every_n_layers: int = Field(default=2, ge=2, le=LARGEST_INTEGER)
    """`every_n_layers` only: one layer out of this many is recomputed."""
    gradient_sync: Literal["auto", "last_micro_batch"] = "auto"
    """When gradients are reduced during accumulation. `last_micro_batch` makes FSDP reduce once per step,
    at the price of unsharded gradients; `auto` does so only where ranks hold whole gradients anyway (DDP, ZeRO-1).
    Refused by ZeRO-2 and 3, tensor and expert parallelism and pipeline schedules."""
    garbage_collection_steps: Natural = 50
    """Steps between Python garbage collections, which run on all ranks after the same step. 0: Python decides."""
    limit_gib: float | None = Field(default=None, gt=0)
    """Most memory in GiB that a rehearsal allows each process: of its GPU, or of the host without one. null: what the
    device has."""
