"""Liger's Triton kernels on tensors of a CPU, by Triton's own interpreter: slow, in fp32 alone (NumPy has no bf16).

Import it first in a process of its own: Triton asks for TRITON_INTERPRET when a kernel is defined. Where there is a GPU
nothing is changed.
"""

from __future__ import annotations

import os

import numpy
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


def prepare() -> None:
    """What Triton 3.7 compiles and its interpreter lacks: numbers are tensors to a kernel, and libdevice's functions
    are empty."""
    if DEVICE != "cpu":
        return
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    plain = interpreter._implicit_cvt

    def converted(argument: object) -> object:
        if not isinstance(argument, float):
            return plain(argument)
        return tl.tensor(interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted
    # by name at each call, because the interpreter has its own tl.math while a kernel runs
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
