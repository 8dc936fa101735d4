"""Which batches of a loader a script has trained: what a checkpoint says of them, and how much each one weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import samecurve
from samecurve.errors import ConfigurationError

ROWS = torch.arange(64.0).reshape(16, 4).sin()
# batches of 2 rows have 1, 1, 1, 1, 2, 1, 2 and 2 labels
LABELS = torch.tensor([0, -100, -100, 2, 1, -100, -100, 0, 2, 1, 0, -100, 1, 1, 2, 0])


def count_labels(batch: list[torch.Tensor]) -> int:
    return int((batch[1] != -100).sum())


OURS = partial(samecurve.Accelerator, count=count_labels)


@pytest.fixture(autouse=True)
def fresh():
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    MultiProcessAdapter.warning_once.cache_clear()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


class Script:
    def __init__(self, steps: int, kind: Callable[..., Any] = OURS):
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        data = DataLoader([*zip(ROWS, LABELS, strict=True)], batch_size=2)
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, data)
        self.gradients: list[torch.Tensor] = []

    def train(self, rows: torch.Tensor, labels: torch.Tensor, before: Callable[[], None] = lambda: None) -> None:
        with self.accelerator.accumulate(self.model):
            before()
            self.accelerator.backward(cross_entropy(self.model(rows), labels))
            if self.accelerator.sync_gradients:
                self.gradients.append(self.model.weight.grad.clone())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def place(self) -> tuple[int, int, int]:
        state = self.loader.state_dict()
        return state["epoch"], state["batches"], state["unfinished"]


@pytest.mark.parametrize(
    ("steps", "before", "behind"),
    [
        (1, [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1)], [(0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 4, 0)]),
        (2, [(0, 0, 1), (0, 0, 2), (0, 2, 1), (0, 2, 2)], [(0, 0, 1), (0, 2, 0), (0, 2, 1), (0, 4, 0)]),
    ],
)
def test_a_position_begins_with_the_batch_that_is_not_trained(steps, before, behind):
    """Epoch, batch and batches read behind it: when a batch is handed out, within `accumulate`, and after its step."""
    script, places = Script(steps), []
    for _, batch in zip(range(4), script.loader, strict=False):
        at_first, within = script.place(), []
        script.train(*batch, before=lambda within=within: within.append(script.place()))
        places.append((at_first, *within, script.place()))
    assert places == [*zip(before, before, behind, strict=True)]


def test_a_position_within_several_steps_of_a_batch():
    script, places = Script(4), []
    for _, (rows, labels) in zip(range(2), script.loader, strict=False):
        for _ in range(2):
            script.train(rows, labels.clamp(min=0))
            places.append(script.place())
    assert places == [(0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 2, 0)]


def test_a_position_of_a_loop_that_trains_nothing_has_the_batch_in_hand():
    script = Script(1)
    places = [script.place() for _ in script.loader]
    assert places[1:] == [(0, number, 0) for number in range(2, 8)] + [(1, 0, 0)]


def test_loaders_that_are_read_in_turn_are_trained_together():
    script = Script(1)
    other = script.accelerator.prepare(DataLoader([*zip(ROWS, LABELS, strict=True)], batch_size=1))
    for number, (batch, _) in enumerate(zip(script.loader, other, strict=False)):
        if number == 2:
            break
        script.train(*batch)
        assert script.place() == (0, number + 1, 0) and other.state_dict()["batches"] == number + 1
    assert script.place() == (0, 2, 1) and other.state_dict()["batches"] == 2


@pytest.mark.parametrize("saved_at", [3, 4])
def test_a_state_saved_before_training_a_batch_goes_on_with_it(saved_at, tmp_path):
    script = Script(2)
    for index, batch in enumerate(script.loader):
        if index == saved_at:
            script.accelerator.save_state(tmp_path / "state")
        script.train(*batch)
    other = Script(2)
    other.accelerator.load_state(tmp_path / "state")
    for batch in other.loader:
        other.train(*batch)
    torch.testing.assert_close(other.model.weight, script.model.weight, rtol=0, atol=0)


def test_a_loaded_run_begins_with_a_whole_step(tmp_path):
    script = Script(2)
    for _, batch in zip(range(2), script.loader, strict=False):
        script.train(*batch)
    script.accelerator.save_state(tmp_path / "state")
    other, synced = Script(4), []
    other.accelerator.load_state(tmp_path / "state")
    for batch in other.loader:
        other.train(*batch)
        synced.append(other.accelerator.sync_gradients)
    assert synced == [False, False, False, True, False, True]  # of the 6 batches left


def halves(script: Script) -> None:
    for rows, labels in script.loader:
        for part in (0, 1):
            script.train(rows[part:][:1], labels[part:][:1].clamp(min=0))


def read_ahead(script: Script) -> None:
    batches: Iterator = iter(script.loader)
    for batch in batches:
        for one in [batch, next(batches)]:
            script.train(*one)


@pytest.mark.parametrize("loop", [halves, read_ahead])
def test_micro_batches_that_are_not_the_loaders_count_alike(loop, caplog):
    """As in Accelerate, because nobody knows their units: several of one batch, and batches that are read ahead."""
    made, expected = Script(2), Script(2, accelerate.Accelerator)
    loop(made)
    loop(expected)
    assert len(made.gradients) == len(expected.gradients)
    torch.testing.assert_close(made.gradients, expected.gradients)
    assert caplog.text.count("other micro-batches than the loader's batches in turn") == 1


def test_a_batch_left_out_within_a_step_gives_none_its_weight(caplog):
    script = Script(4, partial(samecurve.Accelerator, count=lambda batch: len(batch[0])))
    for index, (rows, labels) in enumerate(script.loader):
        if index != 2:
            script.train(rows, labels.clamp(min=0))
    alone, trained = Script(4).model, [0, 1, 2, 3, 6, 7, 8, 9]
    cross_entropy(alone(ROWS[trained]), LABELS[trained].clamp(min=0)).backward()
    torch.testing.assert_close(script.gradients[0], alone.weight.grad)
    assert "batches read ahead or left out" in caplog.text


@pytest.mark.parametrize("skipped", [2, 4])
def test_a_script_that_skips_what_it_has_trained_weighs_the_rest_exactly(skipped, caplog):
    script = Script(2)
    for index, batch in enumerate(script.loader):
        if index >= skipped:
            script.train(*batch)
    alone, rows = Script(2).model, slice(2 * skipped, 2 * skipped + 4)
    cross_entropy(alone(ROWS[rows]), LABELS[rows]).backward()
    torch.testing.assert_close(script.gradients[0], alone.weight.grad)
    assert not caplog.text


def test_num_items_of_a_mean_are_refused():
    script = Script(1)
    with pytest.raises(ConfigurationError, match='num_items with reduction="mean"; it divides a sum'):
        script.accelerator.backward(script.model(ROWS).mean(), num_items=16)
