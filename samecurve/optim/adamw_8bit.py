"""AdamW with moments of 8 bits, quantized in blocks (Dettmers et al. 2021, arXiv:2110.02861): bitsandbytes' own.

FSDP2's shards are updated like weights of their own: where they are whole blocks, these are the blocks of the weight.
"""

from __future__ import annotations

import bitsandbytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samecurve.optim.dtensor import to_local
from samecurve.specs.optimizers import BLOCK_8BIT


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """state1 and state2: the moments' codes, uint8, and absmax1 and absmax2: what each block's are multiplied with,
    this rank's blocks alone."""

    def empty_state(self, weight: Tensor) -> dict:
        """What is kept of a weight before its first update."""
        for index, group in enumerate(self.param_groups):
            for place, other in enumerate(group["params"]):
                if other is weight:
                    self.init_state(group, weight, index, place)
        return self.state.pop(weight)

    def init_state(self, group: dict, p: Tensor, gindex: int, pindex: int) -> None:
        """A weight's whole size decides whether its moments are quantized, however it is cut."""
        super().init_state(group, p, gindex, pindex)
        state, num_blocks = self.state[p], -(-to_local(p).numel() // BLOCK_8BIT)
        state |= {key: state[key][:num_blocks].clone() for key in ("absmax1", "absmax2") if key in state}

    def update_step(self, group: dict, p: Tensor, gindex: int, pindex: int) -> None:
        """The kernels take addresses, so they are given a shard's own tensors, which they update in place."""
        if not isinstance(p, DTensor):
            super().update_step(group, p, gindex, pindex)
            return
        state, part = self.state[p], nn.Parameter(to_local(p.detach()))
        part.grad = to_local(p.grad)
        if not part.numel():
            state["step"] += 1
            return
        self.state[part] = {
            key: to_local(value) if isinstance(value, Tensor) else value for key, value in state.items()
        }
        super().update_step(group, part, gindex, pindex)
        state["step"] = self.state.pop(part)["step"]
