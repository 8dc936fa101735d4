"""transformers.Trainer with its own checkpoints, under DDP over gloo.

After https://huggingface.co/docs/transformers/trainer#checkpoints.

    torchrun --nproc_per_node 2 trainer_loop.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import toy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Record(TrainerCallback):
    def __init__(self, directory: Path):
        self.directory = directory

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            toy.record(self.directory, state.global_step, logs["loss"])


def main(directory: Path) -> None:
    # With use_cpu, transformers 5.23 does not pass ddp_timeout on; on a GPU it does. So that a CPU is no disadvantage:
    if toy.WORLD > 1:
        torch.distributed.init_process_group("gloo", timeout=toy.TIMEOUT)
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=toy.STEPS,
        per_device_train_batch_size=toy.GLOBAL_BATCH // toy.WORLD,  # the batch stays the same for any number of them
        learning_rate=toy.LEARNING_RATE,
        warmup_steps=toy.WARMUP_STEPS,
        lr_scheduler_type="cosine",
        weight_decay=toy.WEIGHT_DECAY,
        max_grad_norm=toy.MAX_GRAD_NORM,
        seed=toy.SEED,
        save_strategy="steps",
        save_steps=toy.SAVE_EVERY,
        save_total_limit=toy.KEEP,
        enable_jit_checkpoint=True,  # its own way to save on SIGTERM; off by default
        use_cpu=True,
        ddp_backend="gloo",
        ddp_timeout=int(toy.TIMEOUT.total_seconds()),
        bf16=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=toy.model(), args=arguments, train_dataset=toy.rows(), callbacks=[Record(directory)])
    # `resume_from_checkpoint=True` is the same and an error where there is no checkpoint yet
    trainer.train(resume_from_checkpoint=get_last_checkpoint(directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
