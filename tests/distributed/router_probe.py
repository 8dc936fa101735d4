"""Run under a launcher with train.py's arguments, after a folder: steps of each family of mixtures of experts.

One process group serves all of them. FOLDER/NAME_OF_RUN.json gets the loss, gradient norm and router metrics of each
step, by family and kind of router loss. The coefficient is large, so that the gradient norm shows its part.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from tiny_families import round_trip_config

from samecurve.config.schema import Model
from samecurve.data.batches import StepBatches
from samecurve.engines import factory
from samecurve.models.hf_config import _fields
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "jetmoe", "gpt_oss"]
OWNED_BY_THE_TOKENIZER = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
STEPS = 3


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    plan = preflight.plan(sys.argv[2:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    for family in FAMILIES:
        for kind in ("sequence", "batch"):
            model = Model(config=config(family), router_loss=kind)
            recipe = plan.recipe.model_copy(update={"model": model})
            found[f"{family} {kind}"] = trained(accelerator, replace(plan, recipe=recipe), task)
            gc.collect()
    if accelerator.is_main_process:
        (folder / f"{Path(plan.recipe.output_dir).name}.json").write_text(json.dumps(found))
    accelerator.end_training()


def config(family: str) -> dict:
    """The fields of the tiny model that a recipe may give, with a large coefficient."""
    tiny = round_trip_config(family)
    coefficient = {"aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef": 1.0}
    fields = {key: value for key, value in tiny.to_diff_dict().items() if key in _fields(tiny) - OWNED_BY_THE_TOKENIZER}
    noise = {"router_jitter_noise": 0.3} if family == "phimoe" else {}
    return {"model_type": family} | fields | coefficient | noise


def trained(accelerator, plan, task) -> dict:
    recipe = plan.recipe
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    steps = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, num_steps=STEPS)
    results = [engine.step(micro_batches, 1e-3) for micro_batches in steps]
    return {
        "engine": engine.describe().engine,
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "router_loss": [result.router["router_loss"] for result in results],
        "expert_share": [result.router["expert_share"] for result in results],
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
