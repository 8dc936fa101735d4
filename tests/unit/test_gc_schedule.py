"""Garbage is collected after the steps that the schedule names, and at no other moment."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
from test_activation_checkpointing import KINDS, build, forward

from samecurve.models.activation_checkpointing import checkpoint_layers
from samecurve.training.gc_schedule import GarbageCollection, frozen_imports

MANY = 5_000  # objects, far beyond what Python waits for before it collects by itself


class Cycle:
    """Only the collector frees it. alive: how many there are."""

    alive = 0

    def __init__(self):
        self.itself = self
        Cycle.alive += 1

    def __del__(self):
        Cycle.alive -= 1


@contextmanager
def collections():
    """`seen`: what `at` was when each collection began."""
    seen: list[int | None] = []

    def note(phase: str, info: dict) -> None:
        if phase == "start":
            seen.append(note.at)

    note.at, note.seen = None, seen
    gc.callbacks.append(note)
    yield note
    gc.callbacks.remove(note)


def trained(first, last, every, also_every=(), each=lambda: [Cycle() for _ in range(MANY)]):
    """The steps after which garbage was collected, and the most cycles that were alive then."""
    most, clock = 0, []
    with collections() as noted:
        with GarbageCollection(first, every, also_every, lambda: clock.append(None)) as garbage:
            for noted.at in range(first, last + 1):
                each()
                most = max(most, Cycle.alive)
                garbage.after(noted.at)
            noted.at = None
        seen = [at for at in noted.seen if at is not None]
    assert len(clock) == (every > 0)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    return seen, most


@pytest.fixture(autouse=True)
def clean():
    gc.collect()
    assert Cycle.alive == 0


def test_at_the_steps_of_the_schedule_alone():
    seen, most = trained(1, 12, 5)
    assert seen == [1, 5, 10]
    assert most == 5 * MANY  # of the steps 6 to 10, and so it goes on


def test_a_run_that_goes_on_keeps_to_the_same_steps():
    assert trained(4, 12, 5)[0] == [4, 5, 10]


def test_after_what_makes_all_stand_still_too():
    assert trained(1, 12, 10, also_every=(4, 0))[0] == [1, 4, 8, 10, 12]


def test_zero_leaves_it_to_python():
    seen, most = trained(1, 6, 0)
    assert len(seen) > 6 and set(seen) == set(range(1, 7)) and most < 6 * MANY


def test_what_is_there_after_the_first_step_is_not_looked_at_again():
    kept = [[] for _ in range(MANY)]
    counts: list[int] = []
    trained(1, 3, 2, each=lambda: counts.append(len(gc.get_objects())))
    assert counts[0] > MANY == len(kept) and counts[1] < 1000 and counts[2] < 1000


def test_an_error_in_a_step_leaves_python_as_it_was():
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        trained(1, 3, 2, each=fail)
    assert gc.isenabled()


def test_imports_are_never_looked_at():
    with collections() as noted:
        with frozen_imports():
            noted.at = "import"
            kept = [[] for _ in range(MANY)]
        noted.at = None
        assert gc.isenabled() and "import" not in noted.seen
        assert len(kept) == MANY and len(gc.get_objects()) < 1000
    gc.unfreeze()


def test_a_failed_import_leaves_python_as_it_was():
    with pytest.raises(ImportError), frozen_imports():
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0


EVERY_DAY = ("full", "offload")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in EVERY_DAY else pytest.mark.full) for kind in KINDS]
)
def test_no_tensor_waits_for_the_schedule(kind):
    """Recomputing leaves cycles of functions; one with an activation in it would fill a device within 50 steps."""
    model = build()
    checkpoint_layers(model, KINDS[kind])
    forward(model).backward()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    forward(model).backward()
    gc.collect()
    gc.set_debug(0)
    gc.enable()
    found = [tuple(each.shape) for each in gc.garbage if issubclass(type(each), torch.Tensor)]
    assert gc.garbage and not found
    gc.garbage.clear()
