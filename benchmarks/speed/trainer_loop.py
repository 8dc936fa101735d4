"""transformers.Trainer on samecurve's rows: the same samples in the same order, the same first weights.

    python trainer_loop.py RECIPE OUTPUT.json [--compile] [key=value ...]

On a GPU where there is one. It computes its layers again as soon as the recipe does so in any way. Where the recipe's
optimizer is adamw_bf16 it gets the same bf16 weights, but rounds them to the nearest.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import rows
import torch
from transformers import Trainer, TrainingArguments

from samecurve.config.loader import load_recipe

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_bf16": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    steps = rows.batches(recipe)
    # labels that are shifted already go in as shift_labels; Trainer counts the tokens of `labels`
    samples = [
        {
            **{name: value[i] for name, value in batch.inputs.items()},
            "labels": batch.labels[i],
            "shift_labels": batch.labels[i],
        }
        for step in steps
        for batch in step
        for i in range(len(batch.labels))
    ]
    record, settings = rows.Record(arguments.output), recipe.optimizer
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch.micro_batch_size,
            gradient_accumulation_steps=recipe.batch.accumulation_steps(1),
            gradient_checkpointing=recipe.memory.activation_checkpointing != "none",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            optim=OPTIMIZERS[settings.name],
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
            use_cpu=rows.DEVICE.type == "cpu",
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
        )
        timed = rows.Timed(record, [sum(map(rows.trained, step)) for step in steps])
        model = rows.model(recipe, rows.DEVICE)
        Trainer(model, options, train_dataset=samples, data_collator=_stack, callbacks=[timed]).train()
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
