"""AdamW with moments of 8 bits, quantized in blocks (Dettmers et al. 2021, arXiv:2110.02861): bitsandbytes' own."""

from __future__ import annotations

import bitsandbytes
from torch import Tensor


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """state1 and state2: the moments' codes, uint8, and absmax1 and absmax2: what each block's are multiplied with."""

    def empty_state(self, weight: Tensor) -> dict:
        """What is kept of a weight before its first update."""
        for index, group in enumerate(self.param_groups):
            for place, other in enumerate(group["params"]):
                if other is weight:
                    self.init_state(group, weight, index, place)
        return self.state.pop(weight)
