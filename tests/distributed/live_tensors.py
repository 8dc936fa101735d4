"""Bytes of the tensors that live in this process."""

from __future__ import annotations

import gc

import torch
from torch.distributed.tensor import DTensor


def live_bytes() -> int:
    """Of all tensors' storages, each once."""
    gc.unfreeze()  # what a training loop has frozen would not be listed
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = (each.untyped_storage() for each in tensors if not isinstance(each, DTensor))
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.data_ptr()}.values())
