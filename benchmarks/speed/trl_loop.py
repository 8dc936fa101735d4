"""TRL's SFTTrainer on the conversations of a recipe, with samecurve's tokenizer and first weights.

    python trl_loop.py RECIPE OUTPUT.json [--packing] [--compile] [key=value ...]

It reads a random choice of the samples: as many per step as there are in samecurve's packed rows, a global batch of
them at a time and padded; or a global batch of rows, packed as TRL does it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from random import Random

import rows
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from samecurve.config.loader import load_recipe
from samecurve.config.schema import Recipe
from samecurve.data.find import find_conversations
from samecurve.data.schemas import conversation
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.tasks import registry

SAMPLES = 2000


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    schema = conversation.ChatSchema.of(recipe.data)
    source = find_conversations(recipe.data.path, recipe.data.pattern, schema)
    chats = [list(found.messages) for found in source.documents()]
    chats = Random(recipe.seed).sample(chats, min(SAMPLES, len(chats)))
    data = Dataset.from_list([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats])
    record, settings, tokens = rows.Record(arguments.output), recipe.optimizer, []
    accumulation = 1 if arguments.packing else batches_of_samples(recipe)
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder,
            max_steps=recipe.steps,
            max_length=recipe.batch.sequence_length,
            packing=arguments.packing,
            per_device_train_batch_size=recipe.batch.global_batch_size,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=False,
            learning_rate=settings.learning_rate,
            warmup_steps=recipe.schedule.warmup_steps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            lr_scheduler_type="constant_with_warmup",
            bf16=recipe.precision == "bf16",
            torch_compile=arguments.compile,
            use_cpu=True,
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
        )
        tokenizer = registry.load_task(recipe).tokenizer
        timed = rows.Timed(record, tokens, accumulation)
        trainer = SFTTrainer(
            rows.model(recipe), args=options, train_dataset=data, processing_class=tokenizer, callbacks=[timed]
        )
        collate = trainer.data_collator

        def counted(samples: list[dict]) -> dict:
            batch = collate(samples)
            tokens.append(int((batch["labels"] != IGNORE_INDEX).sum()))
            return batch

        trainer.data_collator = counted
        trainer.train()
    record.write()


def batches_of_samples(recipe: Recipe) -> int:
    """Of a global batch each, that a step of packed rows has on average."""
    places = [batch.inputs["position_ids"] for step in rows.batches(recipe) for batch in step]
    samples = sum(int((each == 0).sum()) for each in places) / recipe.steps
    return max(1, round(samples / recipe.batch.global_batch_size))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--packing", action="store_true")
    main(parser.parse_intermixed_args())
