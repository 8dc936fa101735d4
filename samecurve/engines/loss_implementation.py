"""Chooses how a model computes its loss: from whole logits, in chunks, or by Liger's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from samecurve.errors import ConfigurationError
from samecurve.losses import chunked_cross_entropy
from samecurve.losses.chunked_cross_entropy import HeadInput, place
from samecurve.models import compilation
from samecurve.specs import loss_chunks
from samecurve.specs.precision import COMPILED

if TYPE_CHECKING:
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
        ConfigurationError: as head_implementation.
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
        ConfigurationError: as head_implementation.
    """
    takes_chunks = task.by_log_probability or (task.by_token and task.teacher is None)
    return takes_chunks and _implementation(model, skeleton, recipe) != "full"


def _implementation(model: PreTrainedModel, skeleton: PreTrainedModel, recipe: Recipe) -> str:
    wanted = recipe.loss.implementation
    if not loss_chunks.are_allowed(wanted, recipe.precision):
        return "full"
    return head_implementation(model, skeleton, wanted) or "full"


def head_implementation(model: PreTrainedModel, skeleton: PreTrainedModel, wanted: str) -> str | None:
    """Choose how a model computes head and loss together.

    Args:
        model: allocated or on the meta device.
        skeleton: the same model on the meta device.
        wanted: auto, chunked or liger.

    Returns:
        chunked or liger; None if the head is not chunkable (see is_chunkable).

    Raises:
        ConfigurationError: the head is not chunkable and `wanted` is not auto.
    """
    head = model.get_output_embeddings()
    # an adapter's layer is no nn.Linear, and weights quantized to 4 bits are integers
    if isinstance(head, nn.Linear) and head.weight.is_floating_point() and is_chunkable(skeleton):
        return "liger" if wanted == "liger" else "chunked"
    if wanted == "auto":
        return None
    raise ConfigurationError(
        f"loss.implementation: found {wanted}, but {skeleton.config.model_type} changes what its output head gives "
        "before it is the logits, or an adapter stands around the head; use auto or full"
    )


def is_chunkable(model: PreTrainedModel) -> bool:
    """Whether the output head is a linear layer whose output is the model's logits, in some precision.

    Some model families scale or cap the head's output, and an adapter may wrap the head. The check runs the code after
    the layers of `model`, which is on the meta device, with a stand-in for the head.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or body is model:
        return False
    states = torch.empty(1, 2, model.config.get_text_config().hidden_size, device="meta")
    seen: list[tuple[Tensor, int]] = []
    (parent, name), stand_in = place(model, head), HeadInput(head)

    def note(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        seen.append((output, output._version))

    stand_in.register_forward_hook(note)
    setattr(parent, name, stand_in)
    body.forward = lambda *_args, **_kwargs: _Body(last_hidden_state=states)
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta")).logits
    except Exception:  # a forward that needs other outputs of the layers
        return False
    finally:
        setattr(parent, name, head)
        del body.forward
    # the very tensor, and not changed in place
    return [(id(logits), logits._version)] == [(id(output), version) for output, version in seen]


class _Body(BaseModelOutput):
    """Output of a model's layers, in which every other field (caches, router logits and the like) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
