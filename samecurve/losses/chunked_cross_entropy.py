"""Output head and loss in chunks of tokens, so that the logits of a micro-batch never exist all at once.

The logits are by far the largest tensor of a micro-batch: 4 GB in fp32 for 8,192 tokens and a vocabulary of 128,256,
and the loss needs several copies. Here each chunk's gradient is computed right after its loss (as in Liger kernels, Hsu
et al., 2024, arXiv:2410.10989). Only the gradients with respect to the hidden states and the head's weight are kept for
the backward pass. Untrained tokens, such as a prompt's, are dropped before the head and cost nothing there.

torch's own `linear_cross_entropy` is not used: torch 2.11 lacks the function. In torch 2.13 its chunks fail under
torch.compile, summed bf16 inputs to 34816 instead of 34967, and were slower than plain logits on a CPU (2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from samecurve.losses.cross_entropy import (
    IGNORE_INDEX,
    LOSS,
    sum_and_gradient,
    token_loss_sum,
    token_loss_sum_and_gradient,
)
from samecurve.losses.vocabulary_parallel import OutputHead, VocabularyColumns, own_part
from samecurve.specs import loss_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Measure = Callable[..., Tensor]


class HeadReduction(Protocol):
    """What the output head is to compute in place of logits, in chunks of tokens."""

    def computed(self, hidden: Tensor, head: OutputHead, kind: str = "chunked", compiles: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class TokenSums:
    """Sums over the tokens of a micro-batch that can be computed in chunks of tokens.

    Attributes:
        measure: (logits (n, vocabulary), **targets (n, ...)) -> sums over these tokens; a scalar, or 1-D in evaluation.
        targets: (sequences, sequence_length, ...), on the model's device.
        positions: indices of the trained tokens, see `trained_positions`; None: all tokens.
    """

    measure: Measure
    targets: dict[str, Tensor]
    positions: Tensor | None = None

    def computed(self, hidden: Tensor, head: OutputHead, kind: str = "chunked", compiles: bool = False) -> Tensor:
        """See chunked_sums."""
        return chunked_sums(hidden, head, self, kind, compiles)  # pyright: ignore  # torch.compiler.disable has no types

    def by_token(self) -> TokenSums:
        """Return a copy whose targets are flattened and restricted to the trained tokens, (n, ...)."""
        flat = {name: target.flatten(0, 1) for name, target in self.targets.items()}
        if self.positions is not None:
            flat = {name: target.index_select(0, self.positions) for name, target in flat.items()}
        return replace(self, targets=flat)


@torch.compiler.disable
def chunked_sums(
    hidden: Tensor, head: OutputHead, wanted: TokenSums, kind: str = "chunked", compiles: bool = False
) -> Tensor:
    """Compute the sums `wanted` of the logits head(hidden) in chunks. Collective if the vocabulary is divided.

    In training the gradients are computed at once, and the result is an fp32 scalar.

    Args:
        hidden: (sequences, sequence_length, hidden_size).
        wanted: the sums.
        kind: chunked, or liger for Liger's kernel in training (only for the measure token_loss_sum).
        compiles: whether the measure may be compiled in training.
    """
    wanted, hidden = wanted.by_token(), hidden.flatten(0, 1)
    if wanted.positions is not None:
        hidden = hidden.index_select(0, wanted.positions)
    with prepared(hidden, head) as (hidden, weight, bias, columns):
        if torch.is_grad_enabled():
            if kind == "liger" and len(hidden):
                return liger_loss_sum(hidden, weight, bias, **wanted.targets)
            if columns is not None:
                measured = partial(columns.sum_and_gradient, wanted.measure)
            elif compiles and len(hidden):
                measured = _compiled(wanted.measure)
            else:
                measured = partial(sum_and_gradient, wanted.measure)
            return _SumWithGradients.apply(hidden, weight, bias, wanted, measured, columns)
        weight, bias = as_dtype_of(hidden, weight, bias)
        parts = []
        # sized by the whole vocabulary, because the columns of a chunk are gathered
        for at, targets in _chunks(wanted, head.weight):
            logits = logits_of(hidden[at], weight, bias)
            parts.append(wanted.measure(columns.whole(logits) if columns else logits, **targets))
        return torch.stack(parts).sum(dim=0)


@lru_cache(maxsize=4)
def _compiled(measure: Measure) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return sum_and_gradient of this measure with two compiled kernels, one for the sum and one for its gradient.

    In eager mode a cross-entropy reads and writes an fp32 logit several times.
    """
    if measure is token_loss_sum:
        return torch.compile(token_loss_sum_and_gradient)
    return partial(sum_and_gradient, torch.compile(measure))


class HeadInput(nn.Module):
    """Stand-in for the head that returns its input. It has a weight, because some families read the weight's dtype."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self._head = (head,)  # not as a module of this one
        self.dtype: torch.dtype | None = None

    @property
    def weight(self) -> Tensor:
        return self._head[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self._head[0].bias

    def forward(self, hidden: Tensor) -> Tensor:
        self.dtype = hidden.dtype
        return hidden


def place(model: nn.Module, head: nn.Module) -> tuple[nn.Module, str]:
    """Find the parent module of `head` and the head's attribute name."""
    places = ((parent, name) for parent in model.modules() for name, child in parent.named_children() if child is head)
    return next(places)


def install_chunked_head(model: PreTrainedModel, kind: str = "chunked", compiles: bool = False) -> None:
    """Make `model(**inputs, sums=TokenSums(...))` return those sums instead of the model's output.

    `sums` may also be another HeadReduction, such as LabelLogProbabilities.

    The layers before the head run unchanged, and their output goes to the chunked head. Both run inside the model's own
    forward, where FSDP2 and ZeRO-3 have gathered the weights.

    Args:
        model: allocated or on the meta device, not yet wrapped by a strategy, with a head that is chunkable.
        kind, compiles: see chunked_sums.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)  # see head_implementation
    whole, (parent, name), stand_in = model.forward, place(model, head), HeadInput(head)
    whole_logits = vars(head).get("forward", partial(nn.Linear.forward, head))  # tensor parallelism gathers the columns

    def forward(*args, sums: HeadReduction | None = None, **inputs):
        if sums is None:
            return whole(*args, **inputs)
        setattr(parent, name, stand_in)  # so that .logits is the input of the head
        try:
            hidden = whole(*args, **inputs).logits
        finally:
            setattr(parent, name, head)
        # Some families upcast their logits. A module call, because ZeRO-3 gathers the head's weights in a hook.
        return head(hidden.to(stand_in.dtype), sums)

    def head_forward(input: Tensor, sums: HeadReduction | None = None) -> Tensor:
        return whole_logits(input) if sums is None else sums.computed(input, head, kind, compiles)

    model.forward, head.forward = forward, head_forward


def trained_positions(labels: Tensor) -> Tensor | None:
    """Find the trained tokens: int64 (n,) indices into the flattened labels, or None if all tokens are trained.

    Call with labels on the CPU; on a GPU the call would synchronize with the device.
    """
    trained = (labels != IGNORE_INDEX).flatten()
    return None if trained.all() else trained.nonzero().flatten()


@contextmanager
def prepared(
    hidden: Tensor, head: OutputHead
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, VocabularyColumns | None]]:
    """Yield (hidden, weight, bias, columns) without autocast, which would cast the weight anew in each chunk.

    Hidden states get autocast's dtype. Where the vocabulary is divided, weight and bias are this rank's part of it.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        weight, bias, columns = head.weight, head.bias, None
        if isinstance(weight, DTensor):
            weight, bias, columns = own_part(weight, bias)
        yield hidden, weight, bias, columns


def as_dtype_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in the dtype of the hidden states, without their autograd graph."""
    return weight.detach().to(hidden.dtype), None if bias is None else bias.detach().to(hidden.dtype)


def logits_of(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute (n, columns) of (n, hidden_size), without an autograd graph."""
    return nn.functional.linear(states, weight, bias).detach()


def slices(total: int, weight: Tensor) -> Iterator[slice]:
    """Yield each chunk of `total` tokens for a head of this weight; at least one, which is empty without tokens."""
    size = chunk_size(weight.shape[0], weight.device)
    for start in range(0, max(total, 1), size):
        yield slice(start, min(start + size, total))


@lru_cache  # the same in all steps of a run
def chunk_size(vocabulary_size: int, device: torch.device) -> int:
    """Return the number of tokens per chunk."""
    if device.type == "cpu":
        return loss_chunks.on_cpu(vocabulary_size)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return loss_chunks.on_gpu(vocabulary_size, memory)


class HeadGradients(NamedTuple):
    """Gradients of hidden states, weight and bias, added up chunk by chunk.

    Those of weight and bias are summed in fp32; sums in bf16 would add their own rounding to that of the logits.
    """

    of_hidden: Tensor
    of_weight: Tensor | None
    of_bias: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadGradients:
        """Allocate them; None for a parameter that is not trained."""
        sums = (
            torch.zeros(p.shape, device=p.device) if p is not None and p.requires_grad else None for p in (weight, bias)
        )
        return cls(torch.empty_like(hidden), *sums)

    def add(self, at: slice, of_logits: Tensor, states: Tensor, weight: Tensor) -> None:
        """Add those of one chunk: of_logits (n, columns), states (n, hidden_size), weight in their dtype."""
        torch.mm(of_logits, weight, out=self.of_hidden[at])
        if self.of_weight is not None:
            self.of_weight.add_(of_logits.t() @ states)
        if self.of_bias is not None:
            self.of_bias.add_(of_logits.sum(dim=0, dtype=torch.float32))


class _SumWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: TokenSums,
        measured: Callable[..., tuple[Tensor, Tensor]],
        columns: VocabularyColumns | None,
    ) -> Tensor:
        """Compute the sum and its gradients chunk by chunk.

        `hidden` is (n, hidden_size) in the compute dtype. With `columns`, weight and bias are this rank's part.
        `measured`: see sum_and_gradient.
        """
        computed, shift = as_dtype_of(hidden, weight, bias)
        total, gradients = torch.zeros((), device=hidden.device), HeadGradients.of(hidden, weight, bias)
        for at, targets in _chunks(wanted, computed):
            states = hidden[at]
            logits = logits_of(states, computed, shift)
            with record_function(LOSS):
                loss, gradient = measured(logits, **targets)
            total += loss
            gradients.add(at, gradient, states, computed)
        if columns is not None:
            # each rank's columns give one term of the gradient
            dist.all_reduce(gradients.of_hidden, group=columns.group)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if p is None else p.dtype for p in (hidden, weight, bias)]
        return total

    @staticmethod
    def backward(ctx, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((None if g is None else (g * factor).to(dtype)) for g, dtype in gradients), None, None, None


def _chunks(wanted: TokenSums, weight: Tensor) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yield each chunk's slice and targets; at least one chunk, which is empty if no token is trained."""
    for at in slices(len(next(iter(wanted.targets.values()))), weight):
        yield at, {name: target[at] for name, target in wanted.targets.items()}


def liger_loss_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Compute token_loss_sum, an fp32 scalar, by Liger's kernel. `hidden` is (n, hidden_size) with n > 0.

    Gradients of weight and bias are summed in fp32. Unlike in chunked_cross_entropy.py they are finally rounded to
    hidden's dtype, like gradients of full logits.
    """
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    measure = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=torch.float32)
    return measure(weight.to(hidden.dtype), hidden, labels, None if bias is None else bias.to(hidden.dtype))
