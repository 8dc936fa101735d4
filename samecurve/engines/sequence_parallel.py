"""Inputs of a tensor-parallel model's blocks: replicated on all ranks, or divided along the sequence.

Attention and MLP begin with column-parallel layers that share one input. Each layer contributes to the input's
gradient; the contributions are summed on the rank first, and then over the ranks, once per block.

With sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2) each rank computes norms and
residuals for a part of the tokens. An all-gather before a block and a reduce-scatter after it replace the all-reduce,
which sends as much as both. Masks and rotary angles stay whole, because transformers derives them from the embeddings.
So the sequence is cut before the first layer and joined after the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from samecurve.errors import DataError
from samecurve.models.activation_checkpointing import layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_SEQUENCE = 1  # axis of (rows, tokens, features)
_MARK = "samecurve_cuts_sequence"


def share_inputs(blocks: Iterable[nn.Module], mesh: DeviceMesh, is_cut: bool) -> None:
    """Give each block its input whole, as a tensor whose gradient is summed over the mesh's ranks once.

    Args:
        blocks: modules whose first argument is `hidden_states`, (rows, tokens, features).
        mesh: the tensor-parallel ranks.
        is_cut: whether each rank has its part of the tokens, else all ranks have all.
    """
    placement = Shard(_SEQUENCE) if is_cut else Replicate()

    def share(_block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not is_cut and not torch.is_grad_enabled():  # nothing to gather, and no gradient to sum
            return args, kwargs
        states = args[0] if args else kwargs["hidden_states"]
        whole = _moved(states, mesh, placement, Replicate())
        return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})

    for block in blocks:
        block.register_forward_pre_hook(share, with_kwargs=True)


def cut_sequence(model: PreTrainedModel, mesh: DeviceMesh) -> list[str]:
    """Install hooks by which all layers compute norms and residuals on this rank's part of each row.

    A forward pass then raises DataError if the number of ranks does not divide the length of the rows.

    Returns:
        The names of the parameters whose gradients have to be summed over the ranks, because each has its own tokens.
    """
    blocks, cut_tokens, all_tokens = layers(model), Shard(_SEQUENCE), Replicate()
    norm = model.base_model.get_submodule("norm")

    def cut(_layer: nn.Module, args: tuple) -> tuple:
        length, size = args[0].shape[_SEQUENCE], mesh.size()
        if length % size:
            raise DataError(
                f"parallelism_config_tp_sequence_parallel: rows of {length} tokens cannot be divided over {size} "
                f"ranks; pad them to a multiple of {size}, or set the key to false"
            )
        return _moved(args[0], mesh, all_tokens, cut_tokens).to_local(), *args[1:]

    def join(_norm: nn.Module, _args: tuple, states: Tensor) -> Tensor:
        return _moved(states, mesh, cut_tokens, all_tokens).to_local()

    blocks[0].register_forward_pre_hook(cut)
    norm.register_forward_hook(join)
    setattr(norm, _MARK, True)
    inside = {id(parameter) for module in (*blocks, norm) for parameter in module.parameters()}
    return [n for n, p in model.named_parameters() if id(p) in inside and not isinstance(p, DTensor)]


def cuts_sequence(model: nn.Module) -> bool:
    """Whether `cut_sequence` has changed the model."""
    return any(hasattr(module, _MARK) for module in model.modules())


def _moved(states: Tensor, mesh: DeviceMesh, current: Placement, wanted: Placement) -> DTensor:
    """Change where the tokens of (rows, tokens, features) are; the gradient goes the other way."""
    return DTensor.from_local(states, mesh, [current], run_check=False).redistribute(placements=[wanted])
