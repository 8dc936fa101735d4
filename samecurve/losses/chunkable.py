"""Whether the output head of a model can be taken apart from its layers, for a loss in chunks of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from samecurve.errors import ConfigurationError
from samecurve.losses.chunked_cross_entropy import HeadInput, place

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
