"""Token embeddings (input and output), and their extension by new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def embeddings(model: PreTrainedModel) -> set[str]:
    """Find the names of the parameters of the input embedding and the output head."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def grow_embedding(tensor: Tensor, num_rows: int) -> Tensor:
    """Extend an embedding to (num_rows, ...) with rows equal to the mean of the existing ones.

    New tokens then start neither likely nor unlikely. A random row can be far from all existing rows and spoil the loss
    of the first steps (Hewitt, 2021, "Initializing new word embeddings for pretrained language models").
    """
    import torch

    more = num_rows - tensor.shape[0]
    return torch.cat([tensor, tensor.mean(dim=0, keepdim=True).expand(more, *tensor.shape[1:])])
