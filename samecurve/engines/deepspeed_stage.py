"""One process's stage of a DeepSpeed pipeline.

Only the stage's own layers get memory; the other stages' layers stay on the meta device.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from samecurve.errors import ConfigurationError
from samecurve.models.pipeline_split import Decoder, Layer, TiedHead, TokenEmbedding, project

if TYPE_CHECKING:
    from samecurve.models.dropout import DropoutKeys
    from samecurve.strategy.plan import Plan

_TIED = "embedding"


class _Deferred(LayerSpec):
    """Spec of a meta-device layer, whose weights are allocated only on the stage that builds the layer."""

    def __init__(self, layer: Layer, device: torch.device):
        super().__init__(type(layer))
        self.layer, self._device = layer, device

    def build(self, log: bool = False) -> Layer:
        return self.layer.to_empty(device=self._device)


class _Shared(TiedLayerSpec):
    """Spec of the token embedding, which the first stage holds and the last stage uses as the head (`forward`)."""

    def __init__(self, layer: TokenEmbedding, device: torch.device, forward: Callable | None = None):
        super().__init__(_TIED, type(layer), forward_fn=forward, tied_weight_attr=["tokens.weight"])
        self.layer, self._device = layer, device

    def build(self, log: bool = False) -> Layer:
        return self.layer.to_empty(device=self._device)


class StageModule(PipelineModule):
    """The layers of this process's stage, and the assignment of all layers to stages.

    Args:
        layers: all layers of the model.
        dropout: the keys of the model's dropout.
        more: further arguments of PipelineModule.
    """

    def __init__(self, layers: list[LayerSpec], dropout: DropoutKeys, **more: Any):
        self._dropout = dropout
        # DeepSpeed's default, reentrant checkpointing, loses the embedding's gradient, because its inputs are integers.
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        super().__init__(layers, activation_checkpoint_func=recompute, **more)

    def forward(self, forward_input: Any) -> Any:
        if self.training:
            self._dropout.use_next()
        output = super().forward(forward_input)
        last = output[0] if isinstance(output, tuple) else output
        keys = self._dropout.current

        def use_again(_gradient: Tensor) -> None:
            self._dropout.current = keys

        if last.requires_grad:  # the backward pass may recompute, and other micro-batches run in between
            last.register_hook(use_again)
        return output

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return this stage's parameters by Hugging Face name."""
        local = self._layer_specs[self._local_start : self._local_stop]
        return dict(pair for spec in local for pair in spec.layer.named_weights())

    def stages_by_name(self) -> dict[str, int]:
        """Map each Hugging Face name to the stage that owns the parameter; a tied weight belongs to the first stage."""
        owners: dict[str, int] = {}
        for index, spec in enumerate(self._layer_specs):
            for name, _ in spec.layer.named_weights():
                owners.setdefault(name, self.stage_owner(index))
        return owners

    def padded(self, groups: list[dict]) -> list[dict]:
        """Give each empty parameter group a parameter without use.

        DeepSpeed 0.19 sums the gradient norm of one group after the other over all stages (get_grad_norm_direct), and
        waits forever where they have different groups.
        """
        for number, group in enumerate(groups):
            if not group["params"]:
                unused: Any = torch.nn.Parameter(next(self.parameters()).new_zeros(1))
                unused.ds_pipe_replicated, unused.model_parallel = False, True
                self.register_parameter(f"unused_{number}", unused)
                group["params"] = [unused]
        return groups

    def layers_per_stage(self) -> list[int]:
        return [int(stop - start) for start, stop in pairwise(self.parts)]

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, dist.ProcessGroup]]:
        """List the trained tied weights, whose weight.grad DeepSpeed sums over the stages that share them."""
        # without frozen weights, which have no gradient: DeepSpeed's bf16 optimizer fails on them
        pairs = [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]
        for weight, group in pairs:
            # Under fp16 with fp32 accumulation (data_types.grad_accum_dtype) the gradient is here instead. DeepSpeed
            # 0.19 does not sum that one.
            if getattr(weight, "grad_accum", None) is not None:
                dist.all_reduce(weight.grad_accum, group=group)
        return pairs

    def _count_layer_params(self) -> list[int]:
        """Count parameters on the meta device; DeepSpeed's own method would build every layer in turn."""
        return [sum(parameter.numel() for parameter in spec.layer.parameters()) for spec in self._layer_specs]

    def _is_checkpointable(self, functions: Sequence[Callable]) -> bool:
        """Recompute decoder layers but not the logits, as under the other strategies."""
        return any(isinstance(function, Decoder) for function in functions)


def build_stage(
    plan: Plan,
    layers: list[Layer],
    loss: Callable[[Tensor, tuple[Tensor, ...]], Tensor],
    device: torch.device,
    dropout: DropoutKeys,
) -> StageModule:
    """Build this process's stage with uninitialized weights.

    The number of stages and the partition method come from the strategy's JSON; DeepSpeed itself does not read the
    number of stages from there. The recipe's `memory.activation_checkpointing` decides whether activations are
    recomputed. The JSON's `pipeline.activation_checkpoint_interval` sets the number of layers recomputed together
    (default 1) and has no effect by itself.

    Args:
        plan: the recipe and the strategy.
        layers: all layers of the model, on the meta device.
        loss: (logits, targets) -> scalar, called on the last stage.
        device: device of the stage's weights.
        dropout: the keys of the model's dropout.

    Raises:
        ConfigurationError: a stage would have no decoder layer.
    """
    partition = plan.strategy.pipeline_partition
    interval = plan.strategy.pipeline_checkpoint_interval
    specs: list[LayerSpec] = [_Deferred(layer, device) for layer in layers]
    if isinstance(head := layers[-1], TiedHead):
        specs[0], specs[-1] = _Shared(head.embedding, device), _Shared(head.embedding, device, project)
    # DeepSpeed prints its topology and layers, and broadcasts tied weights with autograd enabled
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        module = StageModule(
            specs,
            num_stages=plan.strategy.dims.pp,
            loss_fn=loss,
            partition_method=partition,
            activation_checkpoint_interval=interval if plan.recipe.memory.activation_checkpointing == "full" else 0,
            dropout=dropout,
        )
    for stage, (start, stop) in enumerate(pairwise(module.parts)):
        if not any(isinstance(layer, Decoder) for layer in layers[start:stop]):
            raise ConfigurationError(
                f"{plan.strategy.deepspeed_path}: pipeline.partition {partition!r} leaves stage {stage} of "
                f"{module.num_stages} without a decoder layer (layers per stage: {module.layers_per_stage()}); "
                'use "uniform" or "type:decoder", or fewer pipeline.stages'
            )
    weights: list[Any] = [*module.parameters()]  # with the attributes that DeepSpeed adds
    for weight in weights:
        # DeepSpeed's clip_grad_norm_ (fp32 without ZeRO) mistakes the stage for a tensor-parallel rank: it leaves out
        # all weights of the later stages without this attribute
        weight.model_parallel = not weight.ds_pipe_replicated
    return module
