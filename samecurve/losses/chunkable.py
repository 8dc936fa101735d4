"""Whether the output head of a model can be taken apart from its layers, and a stand-in for the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeadInput(nn.Module):
    """Gives back what comes to it, in the place of the head. Some families ask the head's weight for its dtype."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self._head = (head,)  # not as a module of this one
        self.dtype: torch.dtype | None = None

    @property
    def weight(self) -> Tensor:
        return self._head[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self._head[0].bias

    def forward(self, hidden: Tensor) -> Tensor:
        self.dtype = hidden.dtype
        return hidden


def place(model: nn.Module, head: nn.Module) -> tuple[nn.Module, str]:
    """Find the parent module of `head` and the head's attribute name."""
    places = ((parent, name) for parent in model.modules() for name, child in parent.named_children() if child is head)
    return next(places)


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
