from __future__ import annotations

import random

import numpy as np
import torch

from samecurve.distributed import rng_state

CPU = torch.device("cpu")


def draw() -> tuple:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)


def test_every_generator_goes_on():
    draw()
    states = rng_state.capture(CPU)
    expected = draw()
    draw()
    rng_state.restore(states, CPU)
    assert draw() == expected


def test_states_have_one_length():
    """Host buffers are kept from save to save."""
    lengths = set()
    for _ in range(3):
        lengths.add(tuple(state.numel() for state in rng_state.capture(CPU).values()))
        draw()
        np.random.normal()
        random.gauss(0, 1)
    assert len(lengths) == 1


def test_states_are_bytes():
    assert {state.dtype for state in rng_state.capture(CPU).values()} == {torch.uint8}


def test_ranks_and_steps_draw_differently_and_the_same_again():
    drawn = {}
    for step, rank in [(0, 0), (0, 1), (1, 0)]:
        rng_state.reseed(5, step, rank)
        drawn[step, rank] = draw()
    assert len({value[2] for value in drawn.values()}) == 3
    rng_state.reseed(5, 0, 1)
    assert draw() == drawn[0, 1]
