"""transformers.Trainer on samecurve's rows: the same samples in the same order, the same first weights.

python trainer_loop.py RECIPE OUTPUT.json [--compile] [key=value ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import rows
import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from samecurve.recipe import checked


class InOrder(Trainer):
    def _get_train_sampler(self, *_) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Timed(TrainerCallback):
    def __init__(self, record: rows.Record, tokens: list[int]):
        self.record, self.tokens = record, tokens

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == 0:
            self.record.start()

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if "loss" in (logs or {}):
            self.record.step(logs["loss"], self.tokens[state.global_step - 1])


def main(arguments: argparse.Namespace) -> None:
    recipe = checked(arguments.recipe, arguments.overrides)
    assert recipe.batch.micro_batch_size == recipe.batch.global_batch_size, "one micro-batch per step"
    steps = [micro_batches[0] for micro_batches in rows.batches(recipe)]
    # labels that are shifted already go in as shift_labels; Trainer counts the tokens of `labels`
    samples = [
        {
            **{name: value[i] for name, value in step.inputs.items()},
            "labels": step.labels[i],
            "shift_labels": step.labels[i],
        }
        for step in steps
        for i in range(len(step.labels))
    ]
    record, settings = rows.Record(arguments.output), recipe.optimizer
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch.global_batch_size,
            learning_rate=settings.learning_rate,
            warmup_steps=recipe.schedule.warmup_steps,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            max_grad_norm=settings.max_grad_norm,
            lr_scheduler_type="constant_with_warmup",
            bf16=recipe.precision == "bf16",
            torch_compile=arguments.compile,
            remove_unused_columns=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
        )
        timed = Timed(record, [rows.trained(step) for step in steps])
        InOrder(rows.model(recipe), options, train_dataset=samples, data_collator=_stack, callbacks=[timed]).train()
    record.write()


def _stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--compile", action="store_true")
    main(parser.parse_intermixed_args())
