"""AdamW with 8-bit moments, quantized in blocks (Dettmers et al. 2021, arXiv:2110.02861), based on bitsandbytes.

FSDP2's shards are updated like separate weights. The blocks of a shard that consists of whole blocks are those of the
full weight.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samecurve.config.schema import Optimizer
from samecurve.optim.dtensor import local_gradient, to_local
from samecurve.specs.optimizers import BLOCK_8BIT, SMALLEST_8BIT

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns about missing GPU features

import bitsandbytes  # noqa: E402


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """bitsandbytes' AdamW8bit for FSDP2's shards.

    A weight's state consists of the moments' uint8 codes, state1 and state2, and of each block's scale, absmax1 and
    absmax2, for this rank's blocks only.
    """

    def empty_state(self, weight: Tensor) -> dict:
        """Create a weight's state before its first update."""
        for index, group in enumerate(self.param_groups):
            for place, other in enumerate(group["params"]):
                if other is weight:
                    self.init_state(group, weight, index, place)
        return self.state.pop(weight)

    def init_state(self, group: dict, p: Tensor, gindex: int, pindex: int) -> None:
        """Initialize a weight's state. The full weight's size, not the shard's, decides about quantization."""
        super().init_state(group, p, gindex, pindex)
        state, num_blocks = self.state[p], -(-to_local(p).numel() // BLOCK_8BIT)
        # bitsandbytes makes scales for all blocks of the full weight, whose memory a slice without a copy would keep
        state |= {key: state[key][:num_blocks].clone() for key in ("absmax1", "absmax2") if key in state}

    def update_step(self, group: dict, p: Tensor, gindex: int, pindex: int) -> None:
        """Update a weight in place. The kernels take addresses, so they get the shard's local tensors."""
        if not isinstance(p, DTensor):
            super().update_step(group, p, gindex, pindex)
            return
        state, part = self.state[p], nn.Parameter(to_local(p.detach()))
        part.grad = local_gradient(p)
        if not part.numel():
            state["step"] += 1
            return
        self.state[part] = {
            key: to_local(value) if isinstance(value, Tensor) else value for key, value in state.items()
        }
        super().update_step(group, part, gindex, pindex)
        state["step"] = self.state.pop(part)["step"]  # an int; the tensors are shared and were updated in place


def build(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> AdamW8bit:
    """See build_optimizer."""
    return AdamW8bit(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        min_8bit_size=SMALLEST_8BIT,
    )
