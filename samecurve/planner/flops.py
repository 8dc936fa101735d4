"""FLOPs of a model: 2 per multiplied weight and token forward, 4 s a between tokens, and twice that backward.

The backward pass computes two products for each one of the forward. Without the mask's half, as is the custom.
"""

from __future__ import annotations

from samecurve.planner.shape import ModelShape


def layer_forward(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the FLOPs of one layer's forward: 24 B s h^2 + 4 B s^2 h in a GPT, which is all of inference."""
    tokens = rows * seq
    return 2 * tokens * shape.active_layer_parameters + attention_forward(shape, rows, seq)


def attention_forward(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the FLOPs between tokens in one layer's forward: scores and weighted values, 4 B s^2 a."""
    return 4 * rows * seq**2 * shape.attention_width


def step(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the model's FLOPs of a training step, of which MFU is a share (arXiv:2205.05198, equation 8)."""
    return 3 * (shape.layers * layer_forward(shape, rows, seq) + 2 * rows * seq * shape.head_parameters)


def step_with_selective_recomputation(shape: ModelShape, rows: float, seq: float) -> float:
    """Return the hardware's FLOPs, of which HFU is a share.

    arXiv:2205.05198 counts the whole attention once more (equation 9: s / 3h instead of s / 6h).
    """
    return step(shape, rows, seq) + 3 * shape.layers * attention_forward(shape, rows, seq)
