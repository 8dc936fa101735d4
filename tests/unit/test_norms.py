"""Norms on a GPU are taken in fp32: its fp64 norm would first make an fp64 copy of every tensor."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samecurve.optim import adafactor
from samecurve.optim.dtensor import norms


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm" in func.__name__:
            given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.dtype)]
            self.dtypes[func.__name__.partition(".")[0]] = given
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("norm", [lambda tensor: norms([tensor])[0], adafactor._squares])
def test_a_device_other_than_the_cpu_makes_no_fp64_copy(norm):
    with Seen() as seen:
        found = norm(torch.empty(4, 3, device="meta"))
    assert seen.dtypes == {"_foreach_norm": [torch.float32]}
    assert found.dtype == torch.float64


def test_on_a_cpu_squares_are_summed_in_fp64():
    """By hand: 3^2 + 4^2 = 5^2, and 2^24 + 1 ones, which fp32 cannot count."""
    assert norms([torch.tensor([3.0, 4.0])]).tolist() == [5.0]
    assert adafactor._squares(torch.ones(2**24 + 1)).item() == pytest.approx(2**24 + 1, rel=1e-12, abs=0)
