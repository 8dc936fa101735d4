"""A trained model in one process, for what needs no optimizer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from accelerate import Accelerator

from ..errors import ConfigurationError
from . import rehearsal
from .accelerated import AcceleratedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..tasks import Task


class LoadedEngine(AcceleratedEngine):
    """`evaluate` of an fp32 model on the device at hand, computed in `precision` as in training.

    It is the training engine's own code, so both give the same numbers; the verbs that train are not for it.
    Raises ConfigurationError for fp16 without a GPU, which Accelerate would ignore.
    """

    def __init__(self, model: PreTrainedModel, task: Task, precision: str):
        if rehearsal.needed():
            if precision == "fp16":
                raise ConfigurationError("precision: fp16 needs a GPU; compute in another one: --precision fp32")
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # else Apple's GPU, which lacks float64
        self.accelerator = Accelerator(mixed_precision="no" if precision == "fp32" else precision)
        self.task, self.device = task, self.accelerator.device
        # As in training. With a cache transformers builds no mask that keeps packed documents apart: an eval_loss of
        # 4.60 came out as 4.69.
        model.config.use_cache = False
        self.model = self.accelerator.prepare_model(model, evaluation_mode=True)
