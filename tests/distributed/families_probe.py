"""Run under a launcher with train.py's arguments, after a folder: each model in it is loaded, trained and exported.

One process group serves all of them. FOLDER/FAMILY/start holds what transformers wrote; FOLDER/FAMILY/NAME_OF_RUN gets
the export and logits.pt: the losses of the steps, and the live model's logits with the rows that gave them, or the
error.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from samecurve.config.schema import Model
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.engines import factory
from samecurve.export.hf_export import ExportTarget, export
from samecurve.models import weights
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS = 2


def main() -> None:
    folder = Path(sys.argv[1])
    plan = preflight.plan(sys.argv[2:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    loss, kept = task.loss, []
    task.loss = lambda logits, labels: kept.append((logits.detach().clone(), labels)) or loss(logits, labels)
    for start in sorted(folder.glob("*/start")):
        recipe = plan.recipe.model_copy(update={"model": Model(path=str(start))})
        target = start.parent / Path(recipe.output_dir).name
        try:
            results = trained(accelerator, replace(plan, recipe=recipe), task, kept)
        except Exception:  # of any kind: the other families go on
            results = {"error": traceback.format_exc()}
        if accelerator.is_main_process:
            target.mkdir(exist_ok=True)
            torch.save(results, target / "logits.pt")
        gc.collect()
    accelerator.end_training()


def trained(accelerator, plan, task, kept: list) -> dict:
    recipe = plan.recipe
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    steps = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, num_steps=STEPS)
    losses = [engine.step(micro_batches, 1e-3).loss for micro_batches in steps]
    kept.clear()
    held_out = EvaluationBatches(task.validation, recipe.batch.micro_batch_size, engine.shard)
    engine.evaluate(held_out)
    target = Path(recipe.model.path).with_name(Path(recipe.output_dir).name)
    tensors = chain(engine.parameters(), weights.constant_tensors(skeleton, recipe))
    export(tensors, skeleton, ExportTarget(target, task.tokenizer), accelerator.is_main_process)
    described = {"engine": engine.describe().engine, "attention": weights.describe(skeleton, recipe).attention}
    return {
        "losses": losses,
        "logits": kept[0][0],
        "inputs": held_out[0].inputs,
        "labels": held_out[0].labels,
        **described,
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
