"""Comparison of some weights' first update with their working copies and with the optimizer's arithmetic.

Loss and gradient norm of a step are those of the weights before it, so they cannot show that an update reached another
weight's place, or none. This comparison can, under every engine, because it reads weights by name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samecurve.interfaces.sharded_state import WEIGHT, Master, State
from samecurve.optim.dtensor import to_local
from samecurve.optim.expected_update import expected_update

NUM_WEIGHTS, NUM_VALUES = 64, 16  # compared on each rank, and of each weight
SMALLEST_RATE = 1e-6  # with a smaller learning rate, rounding may keep every weight where it is


@dataclass
class Sample:
    """Some values of a weight before and after its update, (n,) each, and what the optimizer had for them."""

    group: dict[str, Any]
    before: Tensor
    gradient: Tensor
    states: dict[str, Tensor | float]
    copies: list[tuple[Tensor, Tensor]]  # (master, working copy) before and after the update
    after: Tensor = field(default_factory=lambda: torch.zeros(0))


class FirstUpdate:
    """Samples of this rank's weights, taken when the optimizer's step begins and ends.

    Args:
        state: the engine's.
        optimizer: the recipe's optimizer.name.
    """

    def __init__(self, state: State, optimizer: str):
        self._optimizer, self._kinds = optimizer, state.kinds
        self._names = [name for name, kinds in state.kinds.items() if WEIGHT in kinds]
        masters = [*state.masters()]
        # drawn, because every n-th weight might be the same one of each layer
        self._masters = random.Random(0).sample(masters, min(NUM_WEIGHTS, len(masters)))
        self._samples: dict[str, Sample] = {}

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Take samples of the weights that `optimizer.step` updates now; of each weight once, however often it runs."""
        for master, group in self._updated(optimizer):
            if master.name in self._samples:
                continue
            state = optimizer.state.get(master.parameter) or {}  # [...] would store an empty one in this defaultdict
            kinds = [kind for kind in self._kinds[master.name][1:] if kind in state]
            states: dict[str, Tensor | float] = {kind: _values(master, state[kind]) for kind in kinds}
            if states and "step" in state:
                states["step"] = float(state["step"])
            assert master.parameter.grad is not None  # see _updated
            weight, gradient = _values(master, master.parameter), _values(master, master.parameter.grad)
            kept = {key: value for key, value in group.items() if key != "params"} | {"shape": master.shape}
            copies = [(weight, copy)] if (copy := _copy(master)) is not None else []
            self._samples[master.name] = Sample(kept, weight, gradient, states, copies)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Note where `optimizer.step` has put the sampled weights."""
        for master, _ in self._updated(optimizer):
            self._samples[master.name].after = _values(master, master.parameter)

    def _updated(self, optimizer: torch.optim.Optimizer) -> list[tuple[Master, dict]]:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        return [(m, groups[id(m.parameter)]) for m in self._masters if id(m.parameter) in groups]

    def differences(self) -> Tensor:
        """Compare this rank's samples, once the engine has finished the step.

        Returns:
            fp64 on the CPU, to be summed over the ranks, see `problems`: for each weight whether a working copy is
            wrong, whether the update is, by how much it should have moved and by how much it has; then the number of
            weights that should have moved and the number that have.
        """
        table, moves = torch.zeros(len(self._names), 4, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for master in self._masters:
            sample = self._samples.get(master.name)
            if sample is None or not sample.after.isfinite().all():
                continue  # no gradient reached the weight; or the next step's loss ends the run and says why
            row, copy = table[self._names.index(master.name)], _copy(master)
            copies = [*sample.copies, (sample.after, copy)] if copy is not None else sample.copies
            row[0] = any(not torch.equal(whole.to(copy.dtype), copy) for whole, copy in copies)
            states = sample.states
            value, slack = expected_update(self._optimizer, sample.group, sample.before, sample.gradient, states)
            before, after = sample.before.double(), sample.after.double()
            excess = (after - value).abs() - slack
            worst = int(excess.argmax())
            if excess[worst] > 0:
                row[1:] = torch.stack([torch.ones(()), value[worst] - before[worst], after[worst] - before[worst]])
            rate = sample.group["lr"]
            # plain SGD's move of a small gradient may be less than the weight's last digit
            moving = torch.where(
                slack > 0.1 * rate, sample.gradient != 0, value.to(sample.before.dtype) != sample.before
            )
            if rate >= SMALLEST_RATE and moving.any():
                moves += torch.tensor([1.0, float((after != before).any())])
        return torch.cat([table.flatten(), moves])

    def problems(self, sums: Sequence[float]) -> list[str]:
        """Describe what `differences` found, summed over all ranks."""
        *values, num_samples, num_moved = sums
        rows = [values[start : start + 4] for start in range(0, len(values), 4)]
        named = [*zip(self._names, rows, strict=True)]
        problems, copied = [], [name for name, row in named if row[0]]
        if copied:
            problems.append(f"the weights that the model computes with are not the optimizer's: {_first(copied)}")
        wrong = [name for name, row in named if row[1]]
        if wrong:
            number, asked, done = dict(named)[wrong[0]][1:]
            problems.append(
                f"optimizer.name: {self._optimizer} should move a value by {asked / number:.4g}, but it moved by "
                f"{done / number:.4g}: {_first(wrong)}"
            )
        if num_samples and not num_moved and not wrong:
            problems.append(f"optimizer.name: {self._optimizer} has a gradient, but no weight moved")
        return problems


def _values(master: Master, tensor: Tensor) -> Tensor:
    """Return NUM_VALUES values, evenly spread over the master's region, of its parameter or of a state of it."""
    return _spread(to_local(tensor.detach()).reshape(-1).narrow(0, master.start, master.numel))


def _copy(master: Master) -> Tensor | None:
    working = master.working()
    return None if working is None else _spread(working.reshape(-1))


def _spread(values: Tensor) -> Tensor:
    count = min(len(values), NUM_VALUES)
    indexes = torch.arange(count, device=values.device) * (len(values) - 1) // max(count - 1, 1)
    return values[indexes].cpu()


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"
