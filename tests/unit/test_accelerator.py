"""samecurve.Accelerator in one process, beside Accelerate's own class and plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs, DeepSpeedPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import samecurve
from samecurve.accelerator import accelerator as module
from samecurve.accelerator import sync_batch_norm

ROWS = torch.arange(44.0).reshape(11, 4).sin()
LABELS = torch.tensor([0, -100, -100, 2, 1, -100, -100, 0, 2, 1, 0])  # 1, 2, 2 and 2 labels in micro-batches of 3
