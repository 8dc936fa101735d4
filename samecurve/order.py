"""The global sample order: a pure function of (seed, epoch, position), with no state to save and no list to shuffle.

The position counts the global rows consumed since the run began, so the order does not depend on the number of ranks,
and going on from any position costs nothing.
"""

from __future__ import annotations

import numpy as np

# Eight rounds: four are a pseudo-random permutation for large domains (Luby and Rackoff, 1988), small ones need more.
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def rows_at(positions: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Row indices at the given positions: int64, the shape of `positions`, each in [0, num_rows).

    Every epoch (positions e * num_rows ... (e + 1) * num_rows - 1) visits every row once, in an order of its own. A
    Feistel network over the next power of four, applied again until the value falls below num_rows ("cycle walking",
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002), which is a bijection for every num_rows
    and takes less than four rounds of walking on average.
    """
    shape = np.shape(positions)
    epochs, places = np.divmod(np.asarray(positions, dtype=np.uint64).ravel(), np.uint64(num_rows))
    keys = _mix(_mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64)) + epochs * np.uint64(_GOLDEN))
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    rows = _feistel(places, keys, half_bits)
    while (outside := rows >= num_rows).any():
        rows[outside] = _feistel(rows[outside], keys[outside], half_bits)
    return rows.astype(np.int64).reshape(shape)


def uniform(positions: np.ndarray, width: int, seed: int, draw: int) -> np.ndarray:
    """float64 (len(positions), width) in [0, 1): what is random in the rows that are read at these positions.

    draw: a small number; another one gives independent values.
    """
    start = np.array([(seed * _GOLDEN + draw + 1) & _MASK], dtype=np.uint64)
    keys = _mix(_mix(start) + np.asarray(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    steps = np.arange(width, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mix(keys[:, None] + steps) >> np.uint64(11)) * 2.0**-53


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: np.uint64) -> np.ndarray:
    """A bijection of [0, 4 ** half_bits), one key per value."""
    low_half = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & low_half
    for round_number in range(1, _ROUNDS + 1):
        round_keys = keys + np.uint64(round_number * _GOLDEN & _MASK)
        left, right = right, left ^ (_mix(round_keys ^ right) & low_half)
    return left << half_bits | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
