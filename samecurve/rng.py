"""The generators that a model may draw from while it trains (dropout, layer drop), as bytes."""

from __future__ import annotations

import json
import random

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Tensor]:
    """uint8 (num_bytes,) by generator: torch on the CPU and on this process's GPU, NumPy and Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = [keys.tolist(), position, has_gauss, gauss]
    states = {
        "torch_cpu": torch.get_rng_state(),
        "numpy": _packed(numpy_state),
        "python": _packed(random.getstate()),
    }
    if device.type == "cuda":
        states["torch_cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch_cpu"])
    keys, position, has_gauss, gauss = _unpacked(states["numpy"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = _unpacked(states["python"])
    random.setstate((version, tuple(internal), gauss_next))
    if "torch_cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["torch_cuda"], device)


def reseed(seed: int, step: int, rank: int) -> None:
    """For a run that goes on in another world, whose ranks have no generators of their own to go on with."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _packed(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(tensor: Tensor) -> list:
    return json.loads(tensor.numpy().tobytes())
