"""FSDP2 and HSDP: sharding of a meta-device model, by the settings of Accelerate's plugin."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import DynamoBackend
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from samecurve.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from samecurve.accelerator.mesh import Mesh
    from samecurve.strategy.plan import Plan


Model = TypeVar("Model", bound=Any)  # a module; without transformers' methods it is one unit


def whole_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Do to a script's model what has to be done before it is sharded, as Accelerate does."""
    plugin, dynamo = plugin_of(accelerator), accelerator.state.dynamo_plugin
    if dynamo is not None and dynamo.backend != DynamoBackend.NO:
        raise ConfigurationError("dynamo_backend under FSDP2: compile layers in the script, before prepare")
    if any(weight.is_meta for weight in model.parameters()):
        raise ConfigurationError("FSDP2: the model has weights on the meta device; load them first")
    if accelerator.mixed_precision != "no":  # the optimizer updates fp32
        for weight in model.parameters():
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    if plugin.activation_checkpointing:
        plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(accelerator, model)
    return model


def shard(accelerator: Accelerator, model: Model, mesh: Mesh, whole: Collection[str] = ()) -> Model:
    """Shard the model in place.

    A model on the meta device gets uninitialized shards, and no rank ever holds it as a whole. One with values becomes
    rank 0's, as under DDP. Every rank has all of the weights named in `whole`, in their own dtype, and FSDP2 does not
    reduce their gradients.

    Raises:
        ConfigurationError: fsdp_transformer_layer_cls_to_wrap names no layer of the model.
    """
    plugin: Any = plugin_of(accelerator)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if not is_meta:
        for tensor in (*model.parameters(), *model.buffers()):  # one at a time; fully_shard moves each unit
            value = tensor.detach().to(accelerator.device)
            dist.broadcast(value, 0)
            tensor.data.copy_(value)
    ignored = {weight for name, weight in model.named_parameters() if name in whole}
    options = {**unit_options(accelerator, mesh), "ignored_params": ignored}
    for layer in _layers(model, plugin):
        fully_shard(layer, **options, reshard_after_forward=plugin.reshard_after_forward)
    _shard_ends(model, plugin, options)
    if not is_meta:  # a script computes its loss from what the model returns, in fp32 as under DDP's autocast
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=torch.float32)
    fully_shard(model, **options)
    if is_meta:
        # only CPUOffloadPolicy, not the policy without offload, has pin_memory
        model.to_empty(device="cpu" if getattr(plugin.cpu_offload, "pin_memory", False) else accelerator.device)
        model.tie_weights()  # allocation may have given each of two tied modules its own parameter
    uncovered = [weight for name, weight in model.named_parameters() if name in whole]
    for tensor in (*model.buffers(), *uncovered):  # which CPU offload does not cover
        tensor.data = tensor.data.to(accelerator.device)
    if plugin.forward_prefetch:
        # each layer starts the all-gather of the next layer's weights before its own computation
        for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            for unit, following in pairwise(layer for layer in layers if isinstance(layer, FSDPModule)):
                unit.set_modules_to_forward_prefetch([following])
    return model


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered, so that the next one gathers anew."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _shard_ends(model: Any, plugin: Any, options: dict[str, Any]) -> None:
    """Make units of a transformers model's token embedding and of its last layers."""
    tokens, head = _embeddings(model)
    bias = getattr(head, "bias", None)
    # A head whose bias the model has under a second name (BERT) stays in the root's unit, as that name does.
    if sum(parameter is bias for _, parameter in model.named_parameters(remove_duplicate=False)) <= 1:
        # The last layers stay gathered after the forward pass: the backward pass begins with them.
        last: Any = [module for module in (_final_norm(model), head) if module is not None]
        if tokens is not None and tokens.weight is getattr(head, "weight", None):
            last.append(tokens)
        elif tokens is not None:
            fully_shard(tokens, **options, reshard_after_forward=plugin.reshard_after_forward)
        if last:  # an encoder without a head may have neither
            fully_shard(last, **options, reshard_after_forward=False)


def plugin_of(accelerator: Accelerator) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's settings of FSDP, which a strategy that shards has."""
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    return plugin


def unit_options(accelerator: Accelerator, mesh: Mesh) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that all units have in common."""
    plugin: Any = plugin_of(accelerator)
    policies = {"mp_policy": plugin.mixed_precision_policy, "offload_policy": plugin.cpu_offload}
    return {"mesh": mesh.sharding, **policies}


def _embeddings(model: Any) -> tuple[Any, Any]:
    """Return a transformers model's token embedding and output head; None for what a model lacks."""
    if not hasattr(model, "get_input_embeddings"):
        return None, None
    return model.get_input_embeddings(), model.get_output_embeddings()


def _layers(model: Any, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """List the modules that fsdp_auto_wrap_policy makes units of their own, inner ones first."""
    # experts that are spread over ranks are units already
    inner_first = [part for part in model.modules() if part is not model and not isinstance(part, FSDPModule)][::-1]
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        least = plugin.min_num_params or math.inf
        # Shard gathers these in units of their own. Their parents stay in the root's unit, which the model calls last.
        ends = {*_embeddings(model), _final_norm(model)}
        return [
            module
            for module in inner_first
            # Containers have no forward pass. Parents may read the weight of a childless module without calling it.
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.children())
            if ends.isdisjoint(module.modules()) and sum(p.numel() for p in module.parameters()) > least
        ]
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return []
    asked = plugin.transformer_cls_names_to_wrap
    own, present = getattr(model, "_no_split_modules", None), {type(module).__name__ for module in inner_first}
    names = set(asked or own or ())
    if asked and not names <= present:
        unknown, known = ", ".join(sorted(names - present)), ", ".join(sorted(own or present))
        raise ConfigurationError(
            f"fsdp_config.fsdp_transformer_layer_cls_to_wrap: found {unknown}, but the model's layers are {known}"
        )
    tokens, _ = _embeddings(model)
    # BERT and others list the block around the token embedding, which becomes a unit itself
    return [module for module in inner_first if type(module).__name__ in names and tokens not in [*module.children()]]


def _final_norm(model: nn.Module) -> nn.Module | None:
    if not hasattr(model, "base_model_prefix"):
        return None
    base = getattr(model, str(model.base_model_prefix), model)
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    return norms[-1] if norms else None


def reduces_once(plan: Plan) -> bool:
    """Whether gradients are reduced once per optimizer step instead of after every micro-batch.

    DDP reduces once. FSDP2 reduces after every micro-batch by default, because otherwise each rank would hold
    unsharded gradients.
    """
    if plan.strategy.shards_model:
        return plan.recipe.memory.gradient_sync == "last_micro_batch"
    return plan.strategy.keeps_model and plan.strategy.distributed


def whole_gradient_bytes(plan: Plan, shapes: Mapping[str, torch.Size], reduced_in: torch.dtype | None) -> int:
    """Bytes of unreduced gradients that FSDP2 accumulates on each rank; 0 if it reduces after every micro-batch.

    FSDP2 accumulates in the reduce dtype, whatever the compute dtype.

    Args:
        shapes: full shape of every trained parameter.
        reduced_in: the reduce dtype; None in a single process.
    """
    steps = plan.recipe.batch.accumulation_steps(plan.strategy.dims.dp)
    if reduced_in is None or not plan.strategy.shards_model or not reduces_once(plan) or steps == 1:
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
