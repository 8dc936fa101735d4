"""Run under a launcher with train.py's arguments: trains two steps, keeps the live model's logits, and exports it.

The logits are those of the first held-out rows, as the process that computes their loss sees them; under a pipeline
that is the last stage. Where several processes have parts of a row, they are what the engine puts together. They go to
OUTPUT_DIR/logits.pt with the rows that gave them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.engines import factory
from samecurve.export.hf_export import ExportTarget, export
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    recipe, folder = plan.recipe, Path(plan.recipe.output_dir)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(recipe)
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    kept, loss = [], task.loss
    task.loss = lambda logits, labels: kept.append((logits.detach().clone(), labels)) or loss(logits, labels)
    engine = factory.build(accelerator, plan, skeleton, task)
    for micro_batches in StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, num_steps=2):
        engine.step(micro_batches, 1e-3)
    kept.clear()
    held_out = EvaluationBatches(task.validation, recipe.batch.micro_batch_size, engine.shard)
    engine.evaluate(held_out)
    folder.mkdir(parents=True, exist_ok=True)
    rows, logits = held_out[0], kept[0][0] if kept and engine.shard[0] == 0 else None
    if plan.strategy.dims.cp > 1:
        logits = engine.outputs(rows)
    if logits is not None:
        saved = {
            "logits": logits,
            "input_ids": rows.inputs["input_ids"],
            "position_ids": rows.inputs["position_ids"],
        }
        torch.save(saved, folder / "logits.pt")
    export(engine.parameters(), skeleton, ExportTarget(folder / "model", task.tokenizer), accelerator.is_main_process)
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
