"""Output head and cross-entropy by liger-kernel's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from samecurve.losses.cross_entropy import IGNORE_INDEX


def liger_loss_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Compute token_loss_sum, an fp32 scalar, by Liger's kernel. `hidden` is (n, hidden_size) with n > 0.

    Gradients of weight and bias are summed in fp32. Unlike in chunked_cross_entropy.py they are finally rounded to
    hidden's dtype, like gradients of full logits.
    """
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    measure = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=torch.float32)
    return measure(weight.to(hidden.dtype), hidden, labels, None if bias is None else bias.to(hidden.dtype))
