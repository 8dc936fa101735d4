"""`inspect --leak_test`: changes tokens of the recipe's own rows and sees which outputs of its model move.

What a token must not see, neither trains nor predicts: another document of its packed row, the tokens to its right in a
causal model, and padding. Nothing in a loss curve shows such a leak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from samecurve.config.schema import Adapter
from samecurve.data.batches import EvaluationBatches
from samecurve.data.micro_batch import MicroBatch
from samecurve.engines.evaluation_engine import initial_engine
from samecurve.errors import ConfigurationError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.heads import CAUSAL
from samecurve.tasks import registry
from samecurve.tasks.task_skeleton import skeleton_of

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.interfaces.task import Task

WIDTH = 256  # tokens of a row that the model sees: enough for two documents
SEARCHED_ROWS = 64
# Part of the largest output. The same kernels compute the same numbers from the same inputs, but the tokens of a
# mixture of experts are regrouped, and a row without padding has another shape.
TOLERANCE = 1e-5
LABEL_WIDTH = 18
UNTESTED = "not tested"  # begins the result of a check that could not run
IN_HALF = ("varlen", "flash_attention_2")  # GPU kernels without fp32


def run(recipe: Recipe) -> int:
    """Run the test and print what it found. Returns the exit code.

    An adapter is left out: its matrices work on single tokens.

    Raises:
        ConfigurationError: for a leak.
    """
    task = registry.load_task(recipe)
    recipe = recipe.model_copy(update={"adapter": Adapter()})
    skeleton = skeleton_of(recipe, task)
    attention = skeleton.config._attn_implementation
    # bf16 would round rows of other shapes apart by more than TOLERANCE
    if not (torch.cuda.is_available() and attention in IN_HALF):
        recipe = recipe.model_copy(update={"precision": "fp32"})
    test = LeakTest(task, initial_engine(skeleton, recipe, task).outputs)
    origin = recipe.model.path or "untrained weights"
    print(f"{skeleton.config.model_type} with {attention} attention in {recipe.precision}, {origin}")
    tested = False
    for name, check in (("packed documents", test.documents), ("causality", test.causality), ("padding", test.padding)):
        result = check()
        tested |= not result.startswith(UNTESTED)
        print(f"{name:<{LABEL_WIDTH}}{result}")
    print("no leak found" if tested else "nothing was tested")
    return 0


@dataclass(frozen=True)
class LeakTest:
    """The three checks of a task's training rows. Each returns a sentence and raises ConfigurationError for a leak.

    Attributes:
        task: the task.
        outputs: computes the model's outputs of a micro-batch, (rows, ...), fp32.
    """

    task: Task
    outputs: Callable[[MicroBatch], Tensor | None]

    def documents(self) -> str:
        """Check that no document of a packed row sees another one."""
        first = _first(self._rows, document_boundary)
        if first is None:
            return f"{UNTESTED}: none of {self._num_rows} rows has two documents"
        row, inputs = first
        documents = documents_of(inputs)
        before, worst = self._compute(inputs), 0.0
        for changed in (documents[0], documents[-1]):
            moved = self._moved(inputs, before, changed)
            own = moved[changed].max().item()
            moved[changed] = 0
            worst = max(worst, moved.max().item())
            if own == 0:
                return f"{UNTESTED}: not even the changed document's own outputs move (row {row})"
        if worst > self._limit(before):
            _leak(
                f"the documents of a packed row see each other: in row {row}, of which {len(documents)} documents were "
                f"computed, changing one moves the logits of another by up to {worst:.1e}; set data.packing=false, or "
                "try model.attention=sdpa"
            )
        return f"row {row}: {len(documents)} documents; changing one moves the logits of others by at most {worst:.1e}"

    def causality(self) -> str:
        """Check that no token of a causal model sees those to its right."""
        if self.task.head.kind != CAUSAL.kind:
            return f"{UNTESTED}: a {self.task.head.title} may see both sides"
        inputs = _window(self._rows[0].inputs, 0)
        longest = max(documents_of(inputs), key=lambda span: span.stop - span.start)
        last = longest.stop - 1
        before = self._compute(inputs)
        moved = self._moved(inputs, before, slice(last, last + 1))
        if last == 0 or moved[last] == 0:
            return f"{UNTESTED}: row 0 has a single token, or the changed token does not move its own logits"
        worst = moved[:last].max().item()
        if worst > self._limit(before):
            _leak(
                f"a token sees those to its right: in row 0, changing token {last} moves logits to its left by up to "
                f"{worst:.1e}, so the model reads the answer that it is trained to predict; its attention mask is not "
                "causal, and it cannot be trained as a causal language model"
            )
        return f"row 0: changing token {last} moves the logits to its left by at most {worst:.1e}"

    def padding(self) -> str:
        """Check that a row's outputs are the same without its padding."""
        if "attention_mask" not in self._rows[0].inputs:
            return f"{UNTESTED}: rows are causal, and padding is to the right of their tokens"
        first = _first(self._rows, lambda inputs: None if inputs["attention_mask"].all() else 0)
        if first is None:
            return f"{UNTESTED}: none of {self._num_rows} rows has padding"
        row, inputs = first
        size = int(inputs["attention_mask"].sum())
        with_padding, without = self._compute(inputs), self._compute({n: t[:, :size] for n, t in inputs.items()})
        if with_padding.shape != without.shape:  # one output per token instead of one per text
            with_padding = with_padding[:size]
        worst = (with_padding - without).abs().max().item()
        if worst > self._limit(without):
            _leak(
                f"tokens see padding: without the padding of row {row} ({inputs['input_ids'].shape[1] - size} tokens "
                f"after {size}) its outputs move by up to {worst:.1e}; the model does not follow its attention_mask"
            )
        return f"row {row}: without its padding its outputs move by at most {worst:.1e}"

    @property
    def _rows(self) -> EvaluationBatches:
        return EvaluationBatches(self.task.train.parts[0], 1, (0, 1))

    @property
    def _num_rows(self) -> int:
        return min(SEARCHED_ROWS, len(self._rows))

    def _compute(self, inputs: dict[str, Tensor]) -> Tensor:
        """Compute the outputs of one row, (tokens, ...) or (...,) for a text's single output."""
        labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
        outputs = self.outputs(MicroBatch(inputs, {"labels": labels}))
        assert outputs is not None  # of the only rank
        return outputs[0]

    def _moved(self, inputs: dict[str, Tensor], before: Tensor, changed: slice) -> Tensor:
        """Replace the tokens of a slice. Returns the largest change of each token's outputs, (tokens,)."""
        ids = inputs["input_ids"].clone()
        special = torch.tensor(self.task.tokenizer.all_special_ids)
        ordinary = torch.arange(self.task.vocabulary_size)
        ordinary = ordinary[~torch.isin(ordinary, special)]
        nexts = (torch.searchsorted(ordinary, ids[:, changed]) + 1) % len(ordinary)
        ids[:, changed] = ordinary[nexts]
        return (self._compute({**inputs, "input_ids": ids}) - before).abs().flatten(1).amax(1)

    def _limit(self, outputs: Tensor) -> float:
        return TOLERANCE * outputs.abs().max().item()


def _first(
    rows: EvaluationBatches, find: Callable[[dict[str, Tensor]], int | None]
) -> tuple[int, dict[str, Tensor]] | None:
    """Return index and inputs, in a window, of the first of some rows, evenly spaced, in which `find` finds a place."""
    for index in dict.fromkeys(torch.linspace(0, len(rows) - 1, SEARCHED_ROWS).long().tolist()):
        inputs = {name: tensor[:1] for name, tensor in rows[index].inputs.items()}  # the first of a row's texts
        place = find(inputs)
        if place is not None:
            return index, _window(inputs, place)
    return None


def document_boundary(inputs: dict[str, Tensor]) -> int | None:
    """Return the place at which the second document of a packed row starts."""
    if "position_ids" not in inputs:
        return None
    starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
    return starts[1] if len(starts) > 1 else None


def _window(inputs: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    """Cut WIDTH tokens around a place from the first sequence, with positions that start at 0."""
    start = max(0, place - WIDTH // 2)
    cut = {name: tensor[:1, start : start + WIDTH] for name, tensor in inputs.items()}
    if "position_ids" in cut and start:
        positions = cut["position_ids"].clone()
        positions[:, : place - start] -= positions[0, 0].item()
        cut["position_ids"] = positions
    return cut


def documents_of(inputs: dict[str, Tensor]) -> list[slice]:
    positions = inputs["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    return [slice(*span) for span in zip(starts, [*starts[1:], len(positions)], strict=True)]


def _leak(text: str) -> NoReturn:
    raise ConfigurationError(f"leak test: {text}")
