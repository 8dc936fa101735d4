"""A loop with accelerate's save_state and load_state, under DDP over gloo.

After https://huggingface.co/docs/accelerate/usage_guides/checkpoint.

    torchrun --nproc_per_node 2 accelerate_loop.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import toy
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs, skip_first_batches
from accelerate.utils import ProjectConfiguration
from transformers import get_cosine_schedule_with_warmup


class Progress:
    """Registered for checkpointing, as the documentation says for what save_state does not know of."""

    step = 0

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


def main(directory: Path) -> None:
    checkpoints = directory / "checkpoints"
    found = [int(folder.name.split("_")[1]) for folder in checkpoints.glob("checkpoint_*")]
    accelerator = Accelerator(
        cpu=True,
        # names, order and rotation are left to the library; a name that exists is an error, so it goes on counting
        project_config=ProjectConfiguration(
            str(directory),
            automatic_checkpoint_naming=True,
            total_limit=toy.KEEP,
            iteration=max(found, default=-1) + 1,
        ),
        # seedable: the order of the rows does not depend on the state of a generator, so that it can be resumed.
        # split: the batch stays the same for any number of processes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True, data_seed=toy.SEED),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=toy.TIMEOUT)],
        step_scheduler_with_optimizer=False,
    )
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.LEARNING_RATE, weight_decay=toy.WEIGHT_DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, toy.WARMUP_STEPS, toy.STEPS)
    loader = torch.utils.data.DataLoader(toy.rows(), batch_size=toy.GLOBAL_BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if found:
        accelerator.load_state()  # the newest

    while progress.step < toy.STEPS:
        epoch, done = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for batch in skip_first_batches(loader, done) if done else loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), toy.MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            toy.record(directory, progress.step, accelerator.reduce(loss.detach(), "mean").item())
            if progress.step % toy.SAVE_EVERY == 0:
                accelerator.save_state()
            if progress.step == toy.STEPS:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
