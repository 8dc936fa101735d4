"""Comparison of a session's first update with the recipe, by what the live objects really used.

The description of an engine repeats the recipe where the engine has no setting of its own, so it cannot show that rows
are read twice, that a wrapper scales the learning rate or that gradients are not clipped. Equal curves cannot either if
all strategies share the mistake.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samecurve.errors import TopologyError
from samecurve.interfaces.sharded_state import WEIGHT, Master, State
from samecurve.optim.dtensor import local_gradient, sum_of_squares, to_local
from samecurve.optim.expected_update import expected_update

if TYPE_CHECKING:
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.engine import StepResult
    from samecurve.strategy.plan import Plan

NORM_TOLERANCE = 1e-2  # relative; gradients of bf16 weights are rounded again when they are scaled


@dataclass
class FirstStep:
    """Observer of one engine until its first update, then without any effect.

    Engines report the rows that they read; learning rates, gradients and weights are read as the optimizer gets them.

    Attributes:
        optimizer: the optimizer, with or without the wrappers of Accelerate and DeepSpeed.
        state: the engine's, for some weights, see FirstUpdate.
        shard: (index, count) of this rank among those that read different rows.
        add: sums a CPU tensor, (n,) fp64, over all ranks.
        copies: maps one of the optimizer's parameters to the number of ranks that hold the same elements of it.
        readers: number of ranks that report the same rows, as all of a tensor-parallel group do.
        is_over: whether the first update has been compared, so that nothing else has to be reported.
    """

    plan: Plan
    optimizer: Any
    state: State
    shard: tuple[int, int]
    add: Callable[[Tensor], Sequence[float]]
    copies: Callable[[Any], int] = lambda parameter: 1
    readers: int = 1

    def __post_init__(self):
        self._rows = self.plan.recipe.batch.micro_batches(self.shard[1])[self.shard[0]]
        self.is_over = False
        self._begin()
        stepped = innermost(self.optimizer)
        self._hooks = [stepped.register_step_pre_hook(self._before_update)]
        self._hooks.append(
            stepped.register_step_post_hook(lambda optimizer, args, kwargs: self._update.after(optimizer))
        )

    def _begin(self) -> None:
        self._places: list[Tensor] = []
        self._rates: set[float] = set()
        self._squares, self._updates = 0.0, 0
        self._update = FirstUpdate(self.state, self.plan.recipe.optimizer.name)

    def read(self, batch: MicroBatch) -> None:
        """Note the rows of a micro-batch whose gradient is computed now."""
        if not self.is_over and batch.places is not None:
            self._places.append(batch.places)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Called by the optimizer. DeepSpeed calls it for one parameter group, or a part of one, at a time."""
        self._updates += 1
        self._update.before(optimizer)
        by_copies: dict[int, list[Tensor]] = {}
        for group in optimizer.param_groups:
            self._rates.add(float(group["lr"]) / group.get("rate_factor", 1.0))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_copies.setdefault(self.copies(parameter), []).append(local_gradient(parameter))
        for copies, gradients in by_copies.items():
            self._squares += sum_of_squares(gradients).item() / copies

    def checked(self, result: StepResult, learning_rate: float, unclipped_norm: float | None = None) -> StepResult:
        """Return `result`; after the first step that was applied, compare it with the recipe. Collective.

        Args:
            learning_rate: the schedule's, with which the engine was called.
            unclipped_norm: norm over all elements that the optimizer has, where some of them are not counted in
                `result.grad_norm`.

        Raises:
            TopologyError: on all ranks, with every difference.
        """
        if self.is_over:
            return result
        if not result.applied:
            self._begin()
            return result
        self.is_over = True
        for hook in self._hooks:
            hook.remove()
        wrong = [rate for rate in self._rates if not math.isclose(rate, learning_rate, rel_tol=1e-6)]
        own = torch.tensor([float(bool(wrong)), sum(wrong[:1]), self._squares, self._updates], dtype=torch.float64)
        # this rank's reads of each row of the global batch, padding left out
        counts = torch.zeros(self.plan.recipe.batch.global_batch_size, dtype=torch.float64)
        sizes = [*self._rows, *[None] * len(self._places)]  # a micro-batch too many counts as a whole
        for places, size in zip(self._places, sizes, strict=False):
            counts.index_add_(0, places[:size], torch.ones(len(places[:size]), dtype=torch.float64))
        counts /= self.readers
        num_wrong, rates, squares, updates, *sums = self.add(torch.cat([own, counts, self._update.differences()]))
        reads, problems = sums[: len(counts)], []
        parts = [f"row {place} was read {count:g} times" for place, count in enumerate(reads) if count > 1][:1]
        parts += [f"row {place} never" for place, count in enumerate(reads) if not count][:1]
        if parts:
            text = f"each of {len(reads)} rows has to be read once, but {' and '.join(parts)}"
            problems.append(f"batch.global_batch_size: {text}")
        if num_wrong:
            used = rates / num_wrong
            problems.append(
                f"optimizer.learning_rate: the schedule says {learning_rate:g}, but the optimizer used {used:g}"
            )
        problems += self._clipping_problem(result, unclipped_norm or result.grad_norm, math.sqrt(squares), updates)
        problems += self._update.problems(sums[len(counts) :])
        if problems:
            lines = "\n  ".join(problems)
            raise TopologyError(
                f"strategy {self.plan.strategy.name}: the first step did not do what the recipe says\n  {lines}\n"
                "no checkpoint holds this step; please report it with the versions in run.json"
            )
        return result

    def _clipping_problem(self, result: StepResult, unclipped: float, actual: float, updates: float) -> list[str]:
        limit = self.plan.recipe.optimizer.max_grad_norm
        expected = unclipped * min(1.0, limit / (result.grad_norm + 1e-6))  # as the engines and DeepSpeed clip
        if not updates:
            return ["optimizer: its step was not called"]
        if math.isclose(actual, expected, rel_tol=NORM_TOLERANCE, abs_tol=1e-12):
            return []
        return [
            f"optimizer.max_grad_norm: {limit:g} makes a gradient norm of {expected:.4g} out of {unclipped:.4g}, but "
            f"the optimizer read {actual:.4g}"
        ]


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of DeepSpeed's and Accelerate's wrappers, which are not torch optimizers by name."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


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
    """Comparison of some weights' first update with their working copies and with the optimizer's arithmetic.

    Loss and gradient norm of a step are those of the weights before it, so they cannot show that an update reached
    another weight's place, or none. This comparison can, under every engine, because it reads weights by name. Samples
    of this rank's weights are taken when the optimizer's step begins and ends.

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
