"""The forty reports: those that are planted again, and those that are not."""

from __future__ import annotations

from tests.museum import checkpoints, data, gradients, weights

EXHIBITS = [*gradients.EXHIBITS, *weights.EXHIBITS, *checkpoints.EXHIBITS, *data.EXHIBITS]
# number: reports, reason
NOT_SHOWN = {
    26: ("transformers #39969, unsloth #3421", "weights in mxfp4 need a GPU's kernels"),
    27: (
        "peft #2368, unsloth #3091",
        "after few steps, a right export in bf16 loses as much by rounding as a wrong merge",
    ),
}
