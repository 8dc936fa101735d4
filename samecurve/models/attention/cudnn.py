"""cuDNN's attention kernels, which sdpa prefers on NVIDIA's Hopper and Blackwell, and where they are left out."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

# With a mask, the backward pass gives NaN gradients for lengths of 64 modulo 128, in rows whose scores are all very
# negative (https://github.com/pytorch/pytorch/issues/196678, torch 2.11 and later on compute capability 9 and 10).
_MULTIPLE, _BROKEN_REST = 128, 64
_PREFERRING_CAPABILITIES = (9, 10)
_FEW_PLANS = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


def configure(
    recipe: Recipe, device: torch.device, environ: MutableMapping[str, str] = os.environ, chunks: int = 0
) -> None:
    """Turn cuDNN's attention off where its gradients can be NaN. Applies to the whole process.

    Rows grouped by length have widths that are multiples of 128 (data/datasets/base.py) or the sequence length, so only
    the sequence length can be a broken one. cuDNN is then turned off for attention without a mask, too, because whether
    there is a mask depends on the rows.

    Where context parallelism gathers keys, each of a row's `chunks` has a mask, and the keys up to its own end.

    cuDNN builds a plan for each width, which takes 50 ms and more. Without a mask an environment variable lets similar
    widths share a plan (https://github.com/pytorch/pytorch/pull/155958); the user's value has precedence.
    """
    if device.type != "cuda":
        return
    if recipe.data.group_by_length:
        environ.setdefault(_FEW_PLANS, "1")
    prefers_cudnn = torch.cuda.get_device_capability(device)[0] in _PREFERRING_CAPABILITIES
    length, is_broken = recipe.batch.sequence_length, recipe.batch.sequence_length % _MULTIPLE == _BROKEN_REST
    if chunks:
        is_broken = recipe.data.group_by_length or length // chunks % _MULTIPLE != 0
    if prefers_cudnn and is_broken:
        torch.backends.cuda.enable_cudnn_sdp(False)


def describe(device: torch.device) -> str | None:
    """Say whether sdpa may use cuDNN's kernels, as run.json has it: on, off, or None without an NVIDIA GPU."""
    if device.type != "cuda":
        return None
    return "on" if torch.backends.cuda.cudnn_sdp_enabled() else "off"
