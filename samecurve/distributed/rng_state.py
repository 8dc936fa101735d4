"""State of a process's random generators, as bytes. Masks of dropout come from none of them, see models/dropout.py."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Tensor]:
    """Capture the random generators: torch on the CPU and on this process's GPU, NumPy, Python.

    A normally distributed number that NumPy or Python caches for its next call counts as a generator of its own.

    Returns:
        uint8 (num_bytes,) by generator name. The length of each never changes.
    """
    _, keys, position, has_gauss, gauss = np.random.get_state()
    _, internal, gauss_next = random.getstate()
    states = {
        "torch_cpu": torch.get_rng_state(),
        "numpy": _bytes(np.array([*keys, position], dtype=np.uint32)),
        "numpy_gauss": _bytes(np.array([has_gauss, gauss], dtype=np.float64)),
        "python": _bytes(np.array(internal, dtype=np.uint32)),
        "python_gauss": _bytes(np.array([gauss_next is not None, gauss_next or 0.0], dtype=np.float64)),
    }
    if device.type == "cuda":
        states["torch_cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore generators captured by `capture`."""
    torch.set_rng_state(states["torch_cpu"])
    *keys, position = states["numpy"].numpy().view(np.uint32).tolist()
    has_gauss, gauss = states["numpy_gauss"].numpy().view(np.float64).tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss))
    internal = states["python"].numpy().view(np.uint32).tolist()
    has_next, gauss_next = states["python_gauss"].numpy().view(np.float64).tolist()
    random.setstate((3, tuple(internal), gauss_next if has_next else None))  # 3 is the version of Python's format
    if "torch_cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["torch_cuda"], device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed all generators anew, for a run resumed on a different set of ranks, whose saved generators do not fit."""
    # a hash, because sums of the three are equal for many pairs of step and rank
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _bytes(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.view(np.uint8).copy())
