"""The forwards of a model's modules: their source code, and running them under a mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


@cache  # a model has few classes and many modules
def source(module_class: type[nn.Module]) -> str:
    """Return the source code of a class's forward; "" for torch's own classes and where there is none."""
    if module_class.__module__.startswith("torch."):  # nn.Dropout calls F.dropout, but is replaced as a module
        return ""
    try:
        return inspect.getsource(module_class.forward)
    except (OSError, TypeError):
        return ""


def under(mode: Callable[[], TorchFunctionMode], forward: Callable) -> Callable:
    """Wrap a forward: each call runs under a new mode."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return forward(*args, **kwargs)

    return changed
