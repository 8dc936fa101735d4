"""SplitMix64: random bits without a state. Source: Steele, Lea and Flood, OOPSLA 2014."""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: the generator's increment


def mix(values: np.ndarray) -> np.ndarray:
    """Apply the output function, in which every input bit affects every output bit. values: uint64, of any shape."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
