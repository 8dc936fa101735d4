"""Expert parallelism: each rank of an `ep` group computes some of a layer's experts, and the ranks exchange tokens.

A token goes to the ranks of all experts that its router chose, and the outputs come back. No expert has a capacity
limit (dropless), so the result is that of one process. The experts' own `forward` runs on the tokens that a rank has
received. transformers' plan for an architecture says which weights belong to experts. transformers' own exchange is not
used: up to 5.17 its ranks read the same tokens and sum the experts' outputs. That of 5.23 (AllToAllEP) dispatches as
here, but shards experts for its own loader and not by FSDP2 over the ranks that compute the same ones.
Between passes, FSDP2 shards experts over the ranks that compute the same ones (see `shard`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from samecurve.accelerator.fsdp import plugin_of, unit_options
from samecurve.errors import ConfigurationError
from samecurve.models.flops import num_experts
from samecurve.optim.dtensor import to_local
from samecurve.specs.model_families import allow, families, unproven_uses
from samecurve.strategy.parallel_dims import LOSS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.accelerator.mesh import Mesh
    from samecurve.strategy.plan import Strategy

KEY = "parallelism_config.parallelism_config_ep_size"
_OF_EXPERTS = "grouped_gemm"  # transformers' style of a weight whose first dimension are the experts


def check(model: PreTrainedModel, strategy: Strategy) -> None:
    """Check that the strategy can spread this architecture's experts, before any weight is loaded.

    Raises:
        ConfigurationError: the family is untested, or sizes do not divide.
    """
    config, dims = model.config.get_text_config(), strategy.dims
    family, count, where = config.model_type, num_experts(config), f"{strategy.path}: {KEY}: found {dims.ep}"
    if family not in families("expert_parallel"):
        text = "has not been tested under expert parallelism" if count > 1 else "has no experts"
        known = ", ".join(sorted(families("expert_parallel")))
        use = f"expert parallelism of a {family}; run `python -m samecurve compare RECIPE`"
        refusal = f"{where}, but a {family} {text}; use {known}, or configs/fsdp.yaml"
        allow(unproven_uses(model), use, refusal, fails=not experts_of(model))
    if count % dims.ep:
        sizes = ", ".join(str(size) for size in range(2, count + 1) if count % size == 0)
        text = f"the model has {count} experts, which {dims.ep} does not divide"
        raise ConfigurationError(f"{where}, but {text}; use a size that divides them: {sizes}")
    weights = {name: weight for experts in experts_of(model).values() for name, weight in experts.named_parameters()}
    for name, weight in weights.items():
        rows, columns, *_ = weight.shape
        if (rows // dims.ep) % dims.efsdp and columns % dims.efsdp:
            text = f"{dims.efsdp} processes hold the same {rows // dims.ep} experts, whose {name} has {columns} rows"
            fix = f"{dims.efsdp} divides neither of these counts; start another number of processes"
            raise ConfigurationError(f"{where}, but {text}; {fix}, or use configs/fsdp.yaml")


def apply(model: PreTrainedModel, mesh: Mesh) -> None:
    """Give each rank its part of the experts, on the meta device, and let the ranks exchange tokens around them."""
    ep = mesh.experts["ep"]
    for experts in experts_of(model).values():
        for name, weight in [*experts.named_parameters()]:
            part = distribute_tensor(weight, ep, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
        own = cast(int, experts.num_experts) // ep.size()
        experts.forward = Dispatch(experts, own, ep.get_group())  # pyright: ignore[reportAttributeAccessIssue]
        experts.num_experts = own  # pyright: ignore[reportArgumentType]


def shard(model: nn.Module, mesh: Mesh, accelerator: Accelerator) -> None:
    """Shard each layer's experts with FSDP2 over the ranks that hold the same ones. Call before outer units are made.

    An expert has computed tokens of all ranks, but its gradient is reduced only over the ranks that hold the same
    experts. FSDP2 would divide it by the number of these ranks; it has to be divided like the other gradients.

    Args:
        model: the model; unchanged unless `apply` has spread its experts.
        accelerator: whose settings of FSDP hold for the other weights, too.
    """
    dims = mesh.dims
    options = {**unit_options(accelerator, mesh), "reshard_after_forward": plugin_of(accelerator).reshard_after_forward}

    def place(weight: nn.Parameter) -> Shard:
        # whole experts where the ranks divide those of a group, else a part of each expert
        count = cast(DTensor, weight).to_local().shape[0]
        return Shard(1 if count % dims.efsdp else 0)

    for experts in (module for module in model.modules() if isinstance(module.forward, Dispatch)):
        own = {**options, "mesh": mesh.experts["efsdp"]}
        unit = fully_shard(experts, **own, shard_placement_fn=place)
        unit.set_gradient_divide_factor(float(dims.size(*LOSS)))
        if dims.efsdp > 1:  # on one rank FSDP2 divides without a reduction, and a forced sum would be divided again
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, a sum with a factor


def experts_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules with a layer's experts, by name."""
    plan = model.config.get_text_config().base_model_ep_plan or {}
    patterns = [name.rpartition(".")[0] for name, style in plan.items() if style == _OF_EXPERTS]
    of_layer = "|".join(re.escape(pattern).replace(r"\*", r"\d+") for pattern in patterns)
    expected = re.compile(rf"(?:.*\.)?(?:{of_layer})")  # the plan's names are those of the model without a head
    return {name: module for name, module in model.named_modules() if patterns and expected.fullmatch(name)}


class Dispatch:
    """The `forward` of a layer's experts, of which each rank of a group has some.

    Args:
        experts: the module, whose own forward computes what this rank has received.
        count: experts of each rank; the i-th rank has the i-th part of them.
    """

    def __init__(self, experts: nn.Module, count: int, group: dist.ProcessGroup):
        self._module, self._compute, self._count, self.group = experts, experts.forward, count, group

    def __call__(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs for each token. Collective.

        Args:
            states: (tokens, width) of this rank.
            chosen: (tokens, k) int64, indices among the experts of all ranks.
            weights: (tokens, k), the router's.

        Returns:
            (tokens, width).
        """
        places = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        numbers, sent, received = self.announce(chosen.flatten())
        arrived = _Exchange.apply(states[places // chosen.shape[1]], sent, received, self.group)
        num_rows = len(arrived)
        if not num_rows:  # a row of zeros, so that the backward pass of this rank exchanges and reduces with the others
            arrived, numbers = arrived.sum(dim=0, keepdim=True), numbers.new_zeros(1)
        with _local_weights(self._module):
            # weights of 1: the sender multiplies by the router's, so that their gradient stays there
            outputs = self._compute(arrived, numbers[:, None], arrived.new_ones(len(arrived), 1))[:num_rows]
        outputs = _Exchange.apply(outputs, received, sent, self.group)
        by_token = outputs[places.argsort()].view(*chosen.shape, -1)
        return (by_token * weights[..., None]).sum(dim=1).to(states.dtype)

    def announce(self, chosen: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Exchange with the other ranks how many tokens each expert gets. Collective; synchronizes with the device.

        Returns:
            The experts of the tokens that arrive here, numbered from this rank's first; tokens sent to each rank;
            tokens received from each.
        """
        ranks = self.group.size()
        counts = chosen.new_zeros(ranks * self._count).scatter_add_(0, chosen, torch.ones_like(chosen))
        counts = counts.view(ranks, self._count)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        # the layer's only wait for the device
        sent, received = torch.stack([counts.sum(dim=1), arriving.sum(dim=1)]).tolist()
        numbers = torch.arange(self._count, device=chosen.device).repeat(ranks)
        return numbers.repeat_interleave(arriving.flatten(), output_size=sum(received)), sent, received


@contextmanager
def _local_weights(module: nn.Module) -> Iterator[None]:
    """Replace a module's distributed weights by this rank's parts in the body."""
    whole = dict(module.named_parameters(recurse=False))
    for name, weight in whole.items():
        # past setattr, which accepts only a Parameter; the part is a tensor of the autograd graph
        module._parameters[name] = to_local(weight)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        module._parameters.update(whole)


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group. Back go the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
