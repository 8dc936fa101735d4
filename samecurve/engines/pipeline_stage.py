"""One process's stage of a DeepSpeed pipeline. Its layers get memory; those of other stages stay on the meta device."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from samecurve.errors import ConfigurationError
from samecurve.models.pipeline_split import Decoder, Layer, TiedHead, TokenEmbedding, project

if TYPE_CHECKING:
    from samecurve.strategy.plan import Plan

_TIED = "embedding"


class _Deferred(LayerSpec):
    """A layer on the meta device; built, it has memory for its weights, on the stage that owns it only."""

    def __init__(self, layer: Layer, device: torch.device):
        super().__init__(type(layer))
        self.layer, self._device = layer, device

    def build(self, log: bool = False) -> Layer:
        return self.layer.to_empty(device=self._device)


class _Shared(TiedLayerSpec):
    """The token embedding, on the first stage and, as the head (`forward`), on the last one."""

    def __init__(self, layer: TokenEmbedding, device: torch.device, forward: Callable | None = None):
        super().__init__(_TIED, type(layer), forward_fn=forward, tied_weight_attr=["tokens.weight"])
        self.layer, self._device = layer, device

    def build(self, log: bool = False) -> Layer:
        return self.layer.to_empty(device=self._device)


class StageModule(PipelineModule):
    """The layers that this process owns, and where the others are."""

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """This stage's parameters by Hugging Face name."""
        local = self._layer_specs[self._local_start : self._local_stop]
        return dict(pair for spec in local for pair in spec.layer.named_weights())

    def stages_by_name(self) -> dict[str, int]:
        """The stage that owns each Hugging Face name; for a tied weight the first one."""
        owners: dict[str, int] = {}
        for index, spec in enumerate(self._layer_specs):
            for name, _ in spec.layer.named_weights():
                owners.setdefault(name, self.stage_owner(index))
        return owners

    def layers_per_stage(self) -> list[int]:
        return [int(stop - start) for start, stop in pairwise(self.parts)]

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, dist.ProcessGroup]]:
        """What DeepSpeed sums over the stages that share a weight: weight.grad.

        Under fp16 with fp32 accumulation (data_types.grad_accum_dtype) the gradient is in weight.grad_accum instead,
        which DeepSpeed 0.19 forgets; it is summed here. A frozen weight has neither, and DeepSpeed's bf16 optimizer
        fails on it.
        """
        pairs = [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]
        for weight, group in pairs:
            if getattr(weight, "grad_accum", None) is not None:
                dist.all_reduce(weight.grad_accum, group=group)
        return pairs

    def _count_layer_params(self) -> list[int]:
        """Without building every layer in turn, as DeepSpeed does."""
        return [sum(parameter.numel() for parameter in spec.layer.parameters()) for spec in self._layer_specs]

    def _is_checkpointable(self, functions: Sequence[Callable]) -> bool:
        """Recompute what the other strategies recompute: decoder layers, not the logits."""
        return any(isinstance(function, Decoder) for function in functions)


def build_stage(
    plan: Plan, layers: list[Layer], loss: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> StageModule:
    """This process's stage, its weights not set yet.

    The number of stages and the partition method come from the strategy's JSON, which DeepSpeed itself reads no stages
    from. `memory.activation_checkpointing` of the recipe decides whether activations are recomputed; the JSON's
    `pipeline.activation_checkpoint_interval` says how many layers at a time (default 1), and alone does nothing.
    Raises ConfigurationError when a stage would hold no decoder layer.
    """
    block = plan.strategy.deepspeed.get("pipeline", {})
    partition = block.get("partition", "parameters")
    interval = block.get("activation_checkpoint_interval") or 1
    # it prints its topology and layers, and broadcasts tied weights as if autograd should follow
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        module = StageModule(
            _specs(layers, device),
            num_stages=plan.strategy.pipeline_stages,
            loss_fn=loss,
            partition_method=partition,
            activation_checkpoint_interval=interval if plan.recipe.memory.activation_checkpointing == "full" else 0,
            # DeepSpeed's default, the reentrant kind, loses the embedding's gradient: its inputs are integers
            activation_checkpoint_func=functools.partial(checkpoint, use_reentrant=False),
        )
    for stage, (start, stop) in enumerate(pairwise(module.parts)):
        if not any(isinstance(layer, Decoder) for layer in layers[start:stop]):
            raise ConfigurationError(
                f"{plan.strategy.deepspeed_path}: pipeline.partition {partition!r} leaves stage {stage} of "
                f"{module.num_stages} without a decoder layer (layers per stage: {module.layers_per_stage()}); "
                'use "uniform" or "type:decoder", or fewer pipeline.stages'
            )
    for weight in module.parameters():
        # DeepSpeed's clip_grad_norm_ (fp32 without ZeRO) takes the stage for a tensor-parallel rank: it leaves out all
        # weights of the later stages that do not carry this mark
        weight.model_parallel = not weight.ds_pipe_replicated
    return module


def _specs(layers: list[Layer], device: torch.device) -> list[LayerSpec]:
    if not isinstance(layers[-1], TiedHead):
        return [_Deferred(layer, device) for layer in layers]
    first, *middle, last = layers
    head = _Shared(last.embedding, device, project)
    return [_Shared(first, device), *(_Deferred(layer, device) for layer in middle), head]
