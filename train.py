"""Train a recipe under a strategy: the entry point and the only training loop.

    accelerate launch --config_file configs/STRATEGY.yaml --num_processes N train.py recipes/quickstart.yaml
    torchrun --nproc_per_node N train.py recipes/quickstart.yaml --strategy configs/STRATEGY.yaml
    python train.py recipes/quickstart.yaml
    python train.py recipes/quickstart.yaml --strategy configs/STRATEGY.yaml --num_processes N

A recipe defines the training run; a strategy defines how the run is distributed over devices. The loss curve depends
on the recipe alone. The unit of the loop is one optimizer step, and the loop never checks the strategy. Running the
same command again resumes an interrupted run, also under another strategy or with another number of processes.
"""

import os
import sys
from functools import partial

import samecurve.specs.packages  # noqa: F401 - before the packages that it looks for
from samecurve.checkpoint.fetch import fetch
from samecurve.launch import ranks
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle, status
from samecurve.run.run_directory import RunDirectory
from samecurve.strategy import launchers, preflight
from samecurve.training import gc_schedule, rehearsal


def main() -> None:
    # reports every error in the recipe, the strategy and the command line, before torch is imported
    with status.refusals():
        os.environ.update(launchers.slurm_variables(os.environ))
        plan = preflight.plan(sys.argv[1:], os.environ)
    if plan.processes_to_start:
        ranks.start_and_exit(plan.processes_to_start)
    recipe = plan.recipe
    sources = (source.path for source in recipe.data.sources())
    reads = (recipe.model.path, recipe.distill.teacher, recipe.tokenizer.path, recipe.evaluate.path, *sources)
    is_main = os.environ.get("RANK", "0") == "0"
    fetched = partial(fetch, recipe, plan.resume, plan.fresh)
    run = RunDirectory(recipe.output_dir, is_main, reads, plan.resume, plan.fresh, fetched)
    with lifecycle.supervised(run, plan.strategy.launcher, recipe.watchdog.timeout_seconds) as watch:
        plan = rehearsal.before_training(plan)  # in processes of its own
        with gc_schedule.frozen_imports():
            from samecurve.engines import factory  # imports torch, which takes seconds

            # accelerate.Accelerator(mixed_precision=..., ...), extended in samecurve/accelerator/accelerator.py
            accelerator = factory.build_accelerator(plan)

            from samecurve.training.startup import open_session  # imports transformers, once all ranks have connected

        session = open_session(plan, accelerator, run, watch)  # prepares all parts; accelerator.load_state if resumed
        train(session)
        session.export()
        session.finish()
        accelerator.end_training()


def train(session) -> None:
    """Run the optimizer steps of a Session from its start to the recipe's last step."""
    from samecurve.checkpoint.manager import TrainProgress  # torch is imported by now
    from samecurve.training.evaluator import due

    recipe, run, watch = session.context.recipe, session.context.run, session.context.watch
    accelerator = session.context.accelerator
    task, engine, batches = session.built.task, session.engine, session.batches
    meter, guard, checkpoints = session.meter, session.guard, session.checkpoints
    updates = session.start.updates  # a skipped step does not advance the learning rate schedule
    with session.context.progress as progress, watch.deferred(), session.saving(), session.garbage as garbage:
        meter.restart_clock()
        profiler = session.profiler()
        for step, micro_batches in enumerate(batches, start=session.start.step + 1):
            watch.phase("step", step)
            rate = learning_rate(recipe, updates + 1)
            usual_loss = meter.smoothed_loss
            checkpoints.resumable_at = None
            result = engine.step(micro_batches, rate)  # samecurve/engines/accelerated.py
            updates += result.applied
            width_share = micro_batches[0].width / recipe.batch.sequence_length
            waited, num_inputs = batches.last_wait_seconds, batches.num_inputs
            record = meter.step(step, result, rate, batches.samples, waited, num_inputs, width_share)
            record |= {"skipped_steps": step - updates} | task.step_metrics(result)
            record |= session.recompilations.record(step)
            progress.step(record, meter.smoothed_loss)

            guard.check(step, result, batches)
            if step == recipe.steps:
                guard.check_last(step, updates)
            if guard.compare_replicas(step, engine):
                meter.restart_clock()
            if guard.spiked(step, result, usual_loss, batches):
                updates = session.roll_back(updates)
            stopping = session.early_stopping.state
            here = TrainProgress(step, updates, batches.samples, meter.state, record, batches.anchor, stopping)
            checkpoints.resumable_at = here  # an evaluation adds to its record and its stopping
            if session.validation and due(step, recipe.evaluate.every_steps, recipe.steps):
                session.evaluate(record)

            is_last = session.is_last(step)
            if checkpoints.due(step, is_last) and not guard.is_pending:
                watch.phase("save", step)
                accelerator.save_state(position=here, wait=is_last)
                meter.restart_clock()
            record |= checkpoints.finished()
            run.append_metrics(record)
            accelerator.log(meter.scalars(record), step=step)
            session.advise(record)
            session.stop_if_asked(here)
            garbage.after(step)
            profiler.after(step)
            if is_last:
                break


if __name__ == "__main__":
    lifecycle.end_with(main)
