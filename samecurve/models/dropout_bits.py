"""Random bits of dropout and of routers' noise: a pure function of a key and an index, the same on every device.

No generator has a state, so a mask does not depend on which process draws it, in which order, or how often. The hash is
MurmurHash3's finalizer (public domain) over index and key, with the second word of the key in its middle: keys that
differ in one word only do not give the same sequence at another place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = -1640531535, -2048144789, -1028477387  # 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35 as int32
_PART_ON_CPU = 2**20  # values at a time, so that they stay in a cache
_PART = 2**26


@torch.library.custom_op("samecurve::keep_mask", mutates_args=())
def keep_mask(keys: Tensor, length: int, rate: float, runs: int = 1, part: int = 0, parts: int = 1) -> Tensor:
    """Draw which values dropout keeps. An operator of its own, so that torch.compile does not change its bits.

    A sequence that is divided along one of its axes consists of `runs` equal pieces, and the `part`-th of each piece's
    `parts` equal parts is drawn, as the whole sequence's mask has it.

    Args:
        keys: (sequences, 2) int32, from `keys_of`.
        length: values of each sequence that are drawn.
        rate: probability of dropping a value, rounded to a multiple of 2**-32.
        runs: product of the sizes of the axes before the divided one.
        part: index of the part.
        parts: number of parts.

    Returns:
        (sequences, length) bool, True with probability 1 - rate.
    """
    # the bits are compared as signed numbers, the least of which stands for 0
    threshold, width = round(rate * 2**32) - 2**31, length // runs
    if (runs, parts) != (1, 1):
        # a key for each run, whose first value is that of the part; see `_bits` for how it counts
        starts = (torch.arange(runs, device=keys.device) * parts + part) * width
        first = keys[:, :1] + (starts * _GOLDEN).to(torch.int32)  # both wrap
        keys = torch.stack([first, keys[:, 1:].expand_as(first)], dim=-1).flatten(0, 1)
    keep = torch.empty(len(keys), width, dtype=torch.bool, device=keys.device)
    for place, bits in _bits(keys, width):
        torch.ge(bits, threshold, out=keep[place])  # the upper bits decide the comparison
    return keep.view(-1, length)


def uniform(keys: Tensor, length: int) -> Tensor:
    """Draw numbers between 0 and 1, neither of which is among them.

    Args:
        keys: (sequences, 2) int32, from `keys_of`.
        length: values of each sequence.

    Returns:
        (sequences, length) fp32, odd multiples of 2**-24.
    """
    values = torch.empty(len(keys), length, device=keys.device)
    for place, bits in _bits(keys, length):
        values[place] = ((bits >> 9).bitwise_and_(0x7FFFFF).float() + 0.5) * 2**-23
    return values


def _bits(keys: Tensor, length: int) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield (where, 32 random bits as int32) for parts of a (sequences, length) tensor."""
    first, second = keys.split(1, dim=1)
    part = _PART_ON_CPU if keys.device.type == "cpu" else _PART
    width = max(min(length, part), 1)
    height = max(part // width, 1)
    counter = torch.arange(width, dtype=torch.int32, device=keys.device).mul_(_GOLDEN)
    for top, left in itertools.product(range(0, len(keys), height), range(0, length, width)):
        rows, columns = slice(top, top + height), slice(left, min(left + width, length))
        bits = counter[: columns.stop - left] + (first[rows] + _signed(left * _GOLDEN))
        # int32's shift repeats the sign, so the bits that come in are masked
        bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST).bitwise_xor_(second[rows])
        bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_SECOND)
        yield (rows, columns), bits


@keep_mask.register_fake
def _(keys: Tensor, length: int, rate: float, runs: int = 1, part: int = 0, parts: int = 1) -> Tensor:
    return keys.new_empty(len(keys), length, dtype=torch.bool)


def moved(keys: Tensor, start: int) -> Tensor:
    """Return keys whose first value is that of `keys` at index `start`, for one part of each sequence's values."""
    first, second = keys.unbind(dim=1)
    return torch.stack([first + _signed(start * _GOLDEN), second], dim=1)  # a value's index is added likewise


def keys_of(seed: int, step: int, sequences: np.ndarray, sites: np.ndarray) -> Tensor:
    """Compute the key of each sequence of a step at each place of the model that drops values.

    Args:
        seed: the recipe's seed.
        step: 0-based optimizer step.
        sequences: (n,) int64, the sequences' numbers in the global batch.
        sites: (m,) uint64, numbers of the places.

    Returns:
        (m, n, 2) int32.
    """
    here = _mix(_mix(np.array([seed], dtype=np.uint64)) + np.uint64(step))
    rows = _mix(here + sequences.astype(np.uint64))
    keys = _mix(_mix(sites)[:, None] ^ rows)
    return torch.from_numpy(keys.view(np.int32).reshape(*keys.shape, 2))


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers, as SplitMix64 does (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _signed(value: int) -> int:
    """Reduce modulo 2**32 to an int32."""
    return (value + 2**31) % 2**32 - 2**31
