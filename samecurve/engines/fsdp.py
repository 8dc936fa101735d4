"""FSDP2 and HSDP as accelerate sets them up, for a model that is still on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from samecurve.strategy.plan import Plan


def shard(accelerator: Accelerator, model: PreTrainedModel) -> nn.Module:
    """Shard on the meta device, then allocate: no rank ever holds a full model. Nothing is set yet."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    with _embeddings_left(model), _dtypes_left(accelerator), _policy_left(accelerator):
        model = fsdp2_prepare_model(accelerator, model)
    offloaded = accelerator.state.fsdp_plugin.cpu_offload
    model.to_empty(device="cpu" if getattr(offloaded, "pin_memory", False) else accelerator.device)
    model.tie_weights()  # allocation may give each of two tied modules a parameter of its own
    for buffer in model.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    if accelerator.state.fsdp_plugin.forward_prefetch:
        _prefetch_forward(model)
    accelerator._models.append(model)
    return model


def reduces_once(plan: Plan) -> bool:
    """DDP reduces gradients once a step. FSDP2 reduces every micro-batch, or it would hold whole gradients."""
    family = plan.strategy.family
    return family == "ddp" or (family == "fsdp" and plan.recipe.memory.gradient_sync == "last_micro_batch")


def whole_gradient_bytes(plan: Plan, shapes: Mapping[str, torch.Size], reduced_in: torch.dtype | None) -> int:
    """Of gradients that FSDP2 has not reduced yet, on each rank: it sums them in the dtype that they are reduced in,
    whatever it computes in. shapes: of what is trained. 0 where it holds none beyond a layer's."""
    steps = plan.recipe.batch.accumulation_steps(plan.strategy.data_parallel_size)
    waits = plan.strategy.family == "fsdp" and reduces_once(plan) and steps > 1
    return reduced_in.itemsize * sum(shape.numel() for shape in shapes.values()) if waits else 0


def _prefetch_forward(model: nn.Module) -> None:
    """Each layer asks for the next one's weights before it computes; else that one does when its turn comes."""
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        units = [layer for layer in layers if isinstance(layer, FSDPModule)]
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])


def write(tensor: Tensor, full: Tensor) -> None:
    """Set a weight, or this rank's shard of it. full: the same on every rank."""
    if isinstance(tensor, DTensor):
        # every rank has the same values already, so nothing is sent (src_data_rank=None)
        on_mesh = full.to(tensor.device_mesh.device_type)
        sharded = distribute_tensor(on_mesh, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, full = tensor.to_local(), sharded.to_local()
    tensor.copy_(full)


@contextmanager
def _dtypes_left(accelerator: Accelerator) -> Iterator[None]:
    """Where it computes in bf16, accelerate 1.15 makes fp32 weights of bf16 ones, which one optimizer is made for.

    What is computed in says the policy that accelerator.py passes, so nothing else in there asks for it.
    """
    precision, accelerator.state._mixed_precision = accelerator.state._mixed_precision, "no"
    yield
    accelerator.state._mixed_precision = precision


@contextmanager
def _policy_left(accelerator: Accelerator) -> Iterator[None]:
    """accelerate 1.15 looks for the first model's layers in every later one, where a teacher is of another family."""
    plugin = accelerator.state.fsdp_plugin
    names, policy = plugin.transformer_cls_names_to_wrap, plugin.auto_wrap_policy
    yield
    plugin.transformer_cls_names_to_wrap, plugin.auto_wrap_policy = names, policy


@contextmanager
def _embeddings_left(model: PreTrainedModel) -> Iterator[None]:
    """What accelerate 1.15 makes of encoders: the token embedding would be sharded twice where BERT and others name the
    module around it as one to keep whole; and a head whose bias is tied, too, would share it with the root's group."""
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    around = {type(module).__name__ for module in model.modules() if tokens in module.children()}
    model._no_split_modules = set(model._no_split_modules or ()) - around
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is getattr(head, "bias", None)]
    hidden = ("get_input_embeddings", "get_output_embeddings") if len(names) > 1 else ()
    for name in hidden:
        setattr(model, name, lambda: None)
    yield
    for name in hidden:
        delattr(model, name)
