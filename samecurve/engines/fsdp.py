"""FSDP2 and HSDP: sharding of a meta-device model through Accelerate."""

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
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import PreTrainedModel

    from samecurve.strategy.plan import Plan


def shard(accelerator: Accelerator, model: PreTrainedModel) -> PreTrainedModel:
    """Shard the model on the meta device in place, then allocate the shards: no rank ever holds a full model.

    The allocated weights are uninitialized.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None  # accelerator.py passed it for this strategy
    with _embeddings_left(model), _dtypes_left(accelerator), _policy_left(plugin):
        fsdp2_prepare_model(accelerator, model)
    # only CPUOffloadPolicy, not the policy without offload, has pin_memory
    model.to_empty(device="cpu" if getattr(plugin.cpu_offload, "pin_memory", False) else accelerator.device)
    model.tie_weights()  # allocation may have given each of two tied modules its own parameter
    for buffer in model.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    if plugin.forward_prefetch:
        # each layer starts the all-gather of the next layer's weights before its own computation
        for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            for unit, following in pairwise(layer for layer in layers if isinstance(layer, FSDPModule)):
                unit.set_modules_to_forward_prefetch([following])
    accelerator._models.append(model)
    return model


def reduces_once(plan: Plan) -> bool:
    """Whether gradients are reduced once per optimizer step instead of after every micro-batch.

    DDP reduces once. FSDP2 reduces after every micro-batch by default, because otherwise each rank would hold
    unsharded gradients.
    """
    family = plan.strategy.family
    return family == "ddp" or (family == "fsdp" and plan.recipe.memory.gradient_sync == "last_micro_batch")


def whole_gradient_bytes(plan: Plan, shapes: Mapping[str, torch.Size], reduced_in: torch.dtype | None) -> int:
    """Bytes of unreduced gradients that FSDP2 accumulates on each rank; 0 if it reduces after every micro-batch.

    FSDP2 accumulates in the reduce dtype, whatever the compute dtype.

    Args:
        plan: the strategy and recipe.
        shapes: full shape of every trained parameter.
        reduced_in: the reduce dtype; None in a single process.
    """
    steps = plan.recipe.batch.accumulation_steps(plan.strategy.data_parallel_size)
    if reduced_in is None or plan.strategy.family != "fsdp" or not reduces_once(plan) or steps == 1:
        return 0
    return reduced_in.itemsize * sum(shape.numel() for shape in shapes.values())


def write(tensor: Tensor, full: Tensor) -> None:
    """Copy the full value into a weight, or its part into this rank's shard. `full` is the same on every rank."""
    if isinstance(tensor, DTensor):
        # every rank already has the same values, so src_data_rank=None avoids communication
        on_mesh = full.to(tensor.device_mesh.device_type)
        sharded = distribute_tensor(on_mesh, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, full = tensor.to_local(), sharded.to_local()
    tensor.copy_(full)


@contextmanager
def _dtypes_left(accelerator: Accelerator) -> Iterator[None]:
    """Keep bf16 weights in bf16: Accelerate 1.15 upcasts them to fp32 under bf16 mixed precision.

    The optimizer adamw_bf16 needs bf16 weights. The compute dtype comes from the policy that accelerator.py passes, so
    hiding the precision from Accelerate here changes nothing else.
    """
    precision, accelerator.state._mixed_precision = accelerator.state._mixed_precision, "no"
    yield
    accelerator.state._mixed_precision = precision


@contextmanager
def _policy_left(plugin: FullyShardedDataParallelPlugin) -> Iterator[None]:
    """Restore the wrap policy, so that a teacher of another model family gets its own.

    Accelerate 1.15 would look for the first model's layer classes in every later model.
    """
    names, policy = plugin.transformer_cls_names_to_wrap, plugin.auto_wrap_policy
    yield
    plugin.transformer_cls_names_to_wrap, plugin.auto_wrap_policy = names, policy


@contextmanager
def _embeddings_left(model: PreTrainedModel) -> Iterator[None]:
    """Work around two faults of Accelerate 1.15 with encoders.

    Where BERT and others list the embedding block among the modules not to split, Accelerate would shard the token
    embedding twice. A head with a tied bias would share that bias with the root's parameter group.
    """
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
