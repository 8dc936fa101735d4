"""What a live DeepSpeed engine is asked, by ZeRO and by the pipeline alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import deepspeed


def precision(engine: deepspeed.DeepSpeedEngine) -> str:
    """One of fp32, bf16 and fp16."""
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def may_rescale(engine: deepspeed.DeepSpeedEngine) -> bool:
    """fp16: an overflow that a smaller loss scale may cure. DeepSpeed skips the step and lowers the scale."""
    if not engine.fp16_enabled():
        return False
    scaler = engine.optimizer.loss_scaler
    return scaler.dynamic and scaler.cur_scale > scaler.min_scale
