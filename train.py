"""Train a recipe under a strategy. This file holds the only training loop.

    accelerate launch --config_file configs/STRATEGY.yaml --num_processes N train.py recipes/quickstart.yaml
    torchrun --nproc_per_node N train.py recipes/quickstart.yaml --strategy configs/STRATEGY.yaml
    python train.py recipes/quickstart.yaml

A recipe says what is trained, a strategy how it is spread over devices; the loss curve depends on the recipe alone.
The unit of the loop is one optimizer step, and the loop never asks which strategy it runs under.
"""

import os
import sys

from samecurve import engines, outcome


def main() -> None:
    # every mistake in the recipe, the strategy and the command line is told here, before torch is loaded
    plan = engines.plan(sys.argv[1:], os.environ)

    from samecurve.rundir import RunDirectory

    recipe = plan.recipe
    reads = (recipe.model.path, recipe.tokenizer.path, recipe.data.path, recipe.evaluate.path)
    run = RunDirectory(recipe.output_dir, is_main=os.environ.get("RANK", "0") == "0", reads=reads)
    with outcome.recorded(run):
        accelerator = engines.start(plan)
        train(plan, accelerator, run)
        accelerator.end_training()


def train(plan, accelerator, run) -> None:
    from samecurve import model, tasks
    from samecurve.data import EvaluationBatches, StepBatches
    from samecurve.export import export
    from samecurve.meter import Meter
    from samecurve.optim import learning_rate
    from samecurve.progress import Progress
    from samecurve.rundir import run_facts

    recipe = plan.recipe
    task = tasks.load(recipe)
    skeleton = model.skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = engines.build(accelerator, plan, skeleton, task)
    batches = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, num_steps=recipe.steps)
    held_out = EvaluationBatches(task.held_out, recipe.batch.micro_batch_size, engine.shard) if task.held_out else ()

    described = model.describe(skeleton) | engine.describe()
    facts = run_facts(plan, sys.argv[1:], described, task.describe(), engines.device_name(accelerator))
    run.write_run(facts)
    accelerator.init_trackers(run.tensorboard.name)
    progress = Progress(recipe.steps, recipe.logging.every_steps, enabled=accelerator.is_main_process)
    progress.say(run.notice)
    progress.header(facts)

    updates = 0  # a skipped step does not move the schedule on
    meter = Meter.for_run(recipe, skeleton, accelerator)
    with progress:
        meter.start()
        for step, micro_batches in enumerate(batches, start=1):
            rate = learning_rate(recipe, updates + 1)
            result = engine.step(micro_batches, rate)
            updates += result.applied
            record = meter.step(step, result, rate, batches.last_wait_seconds) | {"skipped_steps": step - updates}
            progress.step(record, meter.smoothed_loss)
            if held_out and due(step, recipe.evaluate.every_steps, recipe.steps):
                metrics = task.metrics(engine.evaluate(held_out))
                progress.evaluation(step, metrics)
                record |= metrics
                meter.start()
            run.append_metrics(record)
            accelerator.log(meter.scalars(record), step=step)

    export(engine.parameters(), skeleton, task.tokenizer, run.model, accelerator.is_main_process)
    progress.say(f"the trained model is in {run.model}")


def due(step: int, every_steps: int, last_step: int) -> bool:
    return every_steps > 0 and (step % every_steps == 0 or step == last_step)


if __name__ == "__main__":
    outcome.leave(outcome.exit_code(main))
