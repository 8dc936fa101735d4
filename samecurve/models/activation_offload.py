"""Layers' inputs in host memory between forward and backward pass, copied while the device computes.

A copy to the host is queued beside the computation. The backward pass takes the layers in reverse: while it computes
one, the input of the layer before is on its way back. The last layer's input stays on the device as well, because the
backward pass begins with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Copies(Protocol):
    """Copies that do not wait for what the device computes after them."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy what is computed so far. The result may be read by `to_device` alone."""
        ...

    def to_device(self, host: Tensor) -> Callable[[], Tensor]:
        """Start to copy back; call the result where the device needs the tensor."""
        ...


class CudaCopies:
    """Copies on a stream of their own, in the order of their start."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not used again before the copy has been made
        return host

    def to_device(self, host: Tensor) -> Callable[[], Tensor]:
        with torch.cuda.stream(self._stream):
            tensor = host.to(self._device, non_blocking=True)
            copied = self._stream.record_event()

        def needed() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            tensor.record_stream(current)  # it was allocated for the other stream
            return tensor

        return needed


class CpuCopies:
    """No copies: the host is the device."""

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_device(self, host: Tensor) -> Callable[[], Tensor]:
        return lambda: host


class _Inputs:
    """Tensors that one layer saves.

    Args:
        before: those of the layer before.
    """

    def __init__(self, copies: Copies, before: _Inputs | None):
        self._copies, self._before = copies, None if before is None else weakref.ref(before)
        self._on_host: list[Tensor] = []
        self._near: dict[int, Callable[[], Tensor]] = {}  # on the device, or on the way to it

    def pack(self, tensor: Tensor) -> int | Tensor:
        # torch.autograd.graph: a hook that keeps the tensor itself, not a detached one, makes a reference cycle
        tensor, index = tensor.detach(), len(self._on_host)
        if not tensor.numel():  # checkpoint of torch 2.11 saves one of them
            return tensor
        self._on_host.append(self._copies.to_host(tensor))
        self._near[index] = lambda: tensor
        return index

    def unpack(self, index: int | Tensor) -> Tensor:
        if isinstance(index, Tensor):
            return index
        self._fetch(index)  # on its way already, unless the graph is used a second time
        tensor = self._near.pop(index)()
        # only now: copies are made in the order of their start, and this tensor is needed first
        if self._before is not None and (before := self._before()) is not None:
            before.prefetch()
        return tensor

    def leave_device(self) -> None:
        self._near.clear()

    def prefetch(self) -> None:
        for index in range(len(self._on_host)):
            self._fetch(index)

    def _fetch(self, index: int) -> None:
        if index not in self._near:
            self._near[index] = self._copies.to_device(self._on_host[index])


class Offload:
    """Tensors of a model's layers that are in host memory between forward and backward pass."""

    def __init__(self) -> None:
        # weak, here and in _Inputs: the graph alone keeps inputs, so that they go with its backward pass
        self._newest: weakref.ref[_Inputs] | None = None

    def of_layer(self, copies: Copies) -> saved_tensors_hooks:
        """Return the context of one layer's forward pass, in which saved tensors are copied to the host."""
        before = self._newest and self._newest()
        if before is not None:
            before.leave_device()
        inputs = _Inputs(copies, before)
        self._newest = weakref.ref(inputs)
        return saved_tensors_hooks(inputs.pack, inputs.unpack)


@cache
def copies_of(device: torch.device) -> Copies:
    """Return one object for each device, so that all models share a stream."""
    return CudaCopies(device) if device.type == "cuda" else CpuCopies()
