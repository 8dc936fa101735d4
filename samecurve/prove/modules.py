"""One step of a trained model, module by module: what each gets and returns, and the gradients of both, row by row."""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

PROJECTIONS = 8
Rows = dict[str, list[float]]  # sketches by row


class Modules:
    """Records a step. Without `begin`, it does nothing.

    Gradients of rows are divided by the number of processes, which makes them those of the objective: the mean of the
    processes' losses.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of modules, by id; empty outside of a forward pass of the step
        self._rows: list[str] = []
        self._mask: Tensor | None = None
        self._forward: dict[str, Rows] = {}  # in the order of the calls
        self._backward: dict[str, Rows] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._places: dict[str, str] = {}  # class and line of each module; line of the script of each call
        self._weights: dict[int, Tensor] = {}  # with a hook
        self._local: dict[str, Tensor] = {}  # gradients of this process's rows
        self._start: dict[str, Tensor] = {}
        self._scale = 1.0
        self._is_on = False

    def begin(
        self, rows: list[str], mask: Any, names: dict[int, str], weights: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Record the forward pass that begins now.

        Args:
            rows: names of the batch's rows.
            mask: of padding, (rows, length), or anything else if nothing is padded.
            names: of the model's modules, by id.
            weights: returns the whole weights, to be called by all processes together.
        """
        self._rows, self._names = rows, names
        self._mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all() else None
        if not self._is_on:
            self._is_on = True
            self._scale = 1.0 / (dist.get_world_size() if dist.is_initialized() else 1)
            self._start = {name: weight.clone() for name, weight in weights().items()}
        self.see("forward")

    def end_forward(self) -> None:
        self._names = {}

    def see(self, action: str) -> None:
        """Note from which line of the script something is called."""
        if self._is_on:
            self._places[action] = script_line()

    def call(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a module, and record it if it is the model's."""
        name = self._names.get(id(module))
        if name is None:
            return call(module, *args, **kwargs)
        if name not in self._places or not name:  # a wrapper of the model has its name, and is called first
            kind = type(module)
            try:
                path, line = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
                path = path.rpartition("site-packages" + os.sep)[2].removeprefix(_folder())
                self._places[name] = f"{kind.__name__}, {path}:{line}"
            except (OSError, TypeError):
                self._places[name] = kind.__name__  # made while the script ran
        for weight_name, weight in module.named_parameters(name, recurse=False):
            if weight.requires_grad and id(weight) not in self._weights and not isinstance(weight, DTensor):
                self._weights[id(weight)] = weight
                weight.register_hook(partial(self._add_gradient, weight_name))
        # a view has the gradient through this module alone
        args = tuple(self._watched(name, value) for value in args)
        kwargs = {key: self._watched(name, value) for key, value in kwargs.items()}
        output = call(module, *args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._record(self._forward, name, "output", self._split(leaf))
                if leaf.requires_grad:
                    leaf.register_hook(partial(self._add_backward, name, "output", self._rows, self._mask))
        return output

    def _watched(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._record(self._forward, name, "input", self._split(value))
        if value.requires_grad:
            value = value.view_as(value)
            value.register_hook(partial(self._add_backward, name, "input", self._rows, self._mask))
        return value

    def _add_backward(self, name: str, side: str, rows: list[str], mask: Tensor | None, gradient: Tensor) -> None:
        self._rows, self._mask = rows, mask
        self._record(self._backward, name, side, self._split(gradient * self._scale))

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        self._local[name] = self._local[name] + gradient if name in self._local else gradient.detach().clone()

    def _record(self, events: dict[str, Rows], name: str, side: str, parts: Iterator[tuple[str, Tensor]]) -> None:
        which = f"{'forward' if events is self._forward else 'backward'} {name} {side}"
        for row, values in parts:
            count = self._counts[which, row]  # of calls, tensors and micro-batches with this row
            self._counts[which, row] += 1
            events.setdefault(f"{name}:{side}:{count}", {})[row] = sketch(name, values)

    def _split(self, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what a tensor has of each row of the batch, without padding."""
        count, length = len(self._rows), self._mask.shape[1] if self._mask is not None else 0
        if length and value.shape[:1] == (count * length,):
            value = value.unflatten(0, (count, length))
        if value.ndim < 2 or value.shape[0] not in (1, count) or length and value.shape[1] != length:
            return
        for index, row in enumerate(self._rows):
            part = value[index if len(value) == count else 0]
            yield row, part if self._mask is None else part[self._mask[index]]

    def record(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Return what the step has shown, after its update. All processes call it together.

        Args:
            weights: after the update.
        """
        shapes: list[dict[str, tuple[int, ...]]] = [{name: (*value.shape,) for name, value in self._local.items()}]
        if dist.is_initialized():
            shapes *= dist.get_world_size()
            dist.all_gather_object(shapes, shapes[0])
        mean = {}
        for name, shape in sorted({name: shape for part in shapes for name, shape in part.items()}.items()):
            mean[name] = self._local[name].clone() if name in self._local else torch.zeros(shape)
            if dist.is_initialized():
                dist.all_reduce(mean[name])
            mean[name] *= self._scale
        return {
            "forward": self._forward,
            "backward": self._backward,
            "before": {name: sketch(name, weight) for name, weight in self._start.items()},
            "local": {name: sketch(name, gradient) for name, gradient in self._local.items()},
            "mean": {name: sketch(name, gradient) for name, gradient in mean.items()},
            "update": {name: sketch(name, weights[name] - weight) for name, weight in self._start.items()},
            "places": self._places,
        }


def script_line() -> str:
    """Return "file:line" of the innermost call that is written in the script, or in a file beside it."""
    folder, frame = _folder(), sys._getframe()
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        is_own = frame.f_globals.get("__name__", "").startswith("samecurve.prove")
        if path.startswith(folder) and "site-packages" not in path and not is_own:
            return f"{path.removeprefix(folder)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _folder() -> str:
    return os.path.dirname(os.path.abspath(sys.argv[0])) + os.sep


def sketch(name: str, values: Tensor) -> list[float]:
    """Return (1 + PROJECTIONS) numbers by which tensors of one name are compared: norm and random projections.

    The difference of two tensors' projections has the size of the norm of their difference, on average
    (Johnson and Lindenstrauss): places count, and not only sizes.
    """
    values = values.detach().double().flatten()
    bits = torch.randint(256, (len(values),), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    signs = ((bits >> torch.arange(PROJECTIONS).unsqueeze(1)) & 1).double() * 2 - 1
    return [values.norm().item(), *(signs @ values).tolist()]
