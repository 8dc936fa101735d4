"""The parameters that have a row for each token, and how they grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def embeddings(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that have a row for each token."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """(num_rows, ...): new tokens begin as the mean of all others, so that they are neither likely nor unlikely.

    A row drawn at random can be far from all that the model knows, and takes the first steps' loss with it
    (Hewitt, 2021, "Initializing new word embeddings for pretrained language models").
    """
    import torch

    more = num_rows - tensor.shape[0]
    return torch.cat([tensor, tensor.mean(dim=0, keepdim=True).expand(more, *tensor.shape[1:])])
