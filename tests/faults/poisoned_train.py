"""train.py with numbers broken on purpose, on some ranks and in some steps of a fresh run.

    SAMECURVE_POISON="input@7-8:1"      kind@first-last:rank, "*" for all ranks

Kinds: loss, gradient, input (of the embedding) become NaN; weight: one becomes NaN before the step and stays it;
updated_weight: the same behind the step's update; flip: one differs from the other ranks'; spike: the loss is 100 times
what it is.
"""

from __future__ import annotations

import os
import re

import torch

import train
from samecurve.engines import factory
from samecurve.run import lifecycle
from tests.distributed.nonfinite_probe import BrokenGradient


class Poison:
    def __init__(self, text: str, rank: int):
        kind, first, last, ranks = re.fullmatch(r"(\w+)@(\d+)-(\d+):(\d+|\*)", text).groups()
        self.kind, self.steps = kind, range(int(first), int(last) + 1)
        self.here = ranks in ("*", str(rank))
        self.step = 0  # 0 outside of a step: evaluation is spared

    def acts(self, *kinds: str) -> bool:
        return self.here and self.kind in kinds and self.step in self.steps

    def into(self, engine, task) -> None:
        self._loss = task.loss
        self._embed = torch.nn.Embedding.forward
        torch.nn.Embedding.forward = lambda module, rows: self.embedded(self._embed(module, rows))
        intact, done = engine.step, 0

        def step(*arguments):
            nonlocal done
            done += 1
            self.step = done
            if self.acts("weight", "flip"):
                self.harm(engine)
            if breaks := self.acts("loss", "gradient", "spike"):
                task.loss = self.loss  # not in other steps: autograd's last digits differ from the built-in gradient's
            result = intact(*arguments)
            if breaks:
                del task.loss
            if self.acts("updated_weight"):
                self.harm(engine)
            self.step = 0
            return result

        engine.step = step

    def loss(self, logits, labels):
        value = self._loss(logits, labels)
        if self.acts("gradient"):
            return BrokenGradient.apply(value)
        factor = float("nan") if self.acts("loss") else 100.0 if self.acts("spike") else 1.0
        return value * factor

    def embedded(self, value):
        return value * float("nan") if self.acts("input") else value

    @torch.no_grad()
    def harm(self, engine) -> None:
        if self.kind == "flip":
            _, tensor = next(iter(engine.state.replicas()))
            tensor.view(-1)[0] += 1e-3
            return
        for _, kind, tensor in engine.state.visit(writing=True):
            if kind == "weight":
                tensor[0] = float("nan")
                return


def build(*arguments):
    task = arguments[-1]
    poison = Poison(os.environ["SAMECURVE_POISON"], int(os.environ.get("RANK", "0")))
    poison.into(engine := intact_build(*arguments), task)
    return engine


if __name__ == "__main__":
    intact_build, factory.build = factory.build, build
    lifecycle.end_with(train.main)
