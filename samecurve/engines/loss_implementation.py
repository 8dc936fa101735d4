"""Chooses how a model computes its loss: from whole logits, in chunks, or by Liger's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.losses import chunkable, chunked_cross_entropy
from samecurve.models import compilation
from samecurve.specs import loss_chunks
from samecurve.specs.precision import COMPILED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.interfaces.task import Task


def install_loss(
    model: PreTrainedModel, skeleton: PreTrainedModel, task: Task, recipe: Recipe, device: torch.device
) -> str:
    """Install the recipe's loss.implementation in `model`, before a strategy wraps the model.

    On a GPU the measure of a chunked loss is compiled wherever there is a compiler, also if the layers are not: in
    eager mode it reads and writes an fp32 logit several times.

    Tasks that need whole logits use the full loss, and so does fp16: the others compute gradients before loss scaling,
    and these are often 0 in fp16.

    Args:
        model: the model that computes on this rank; changed in place.
        skeleton: the whole architecture, on the meta device.
        device: where the loss is computed.

    Returns:
        The implementation in use: full, chunked or liger.

    Raises:
        ConfigurationError: as chunkable.head_implementation.
    """
    takes_chunks = task.by_token or task.by_log_probability
    kind = _implementation(model, skeleton, recipe) if takes_chunks else "full"
    if kind != "full":
        compiles = recipe.compile in COMPILED or compilation.has_triton_compiler(device)
        chunked_cross_entropy.install_chunked_head(model, kind, compiles)
    return kind


def last_stage_takes_chunks(model: PreTrainedModel, skeleton: PreTrainedModel, task: Task, recipe: Recipe) -> bool:
    """Whether the last stage of PyTorch's pipelines computes head and loss in chunks of tokens.

    Args:
        model: the whole model on the meta device, before it is cut into stages.
        skeleton: the same model, as it was built.

    Raises:
        ConfigurationError: as chunkable.head_implementation.
    """
    takes_chunks = task.by_log_probability or (task.by_token and task.teacher is None)
    return takes_chunks and _implementation(model, skeleton, recipe) != "full"


def _implementation(model: PreTrainedModel, skeleton: PreTrainedModel, recipe: Recipe) -> str:
    wanted = recipe.loss.implementation
    if not loss_chunks.are_allowed(wanted, recipe.precision):
        return "full"
    return chunkable.head_implementation(model, skeleton, wanted) or "full"
