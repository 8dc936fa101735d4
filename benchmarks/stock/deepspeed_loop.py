"""A plain DeepSpeed loop, ZeRO-1 over gloo.

After https://www.deepspeed.ai/getting-started/#model-checkpointing.

    torchrun --nproc_per_node 2 deepspeed_loop.py DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
import torch
import toy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_cosine_schedule_with_warmup

# DeepSpeed compiles an all-reduce over shared memory at its first start on a CPU; gloo does the same without it
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_batch_size": toy.GLOBAL_BATCH,
    "train_micro_batch_size_per_gpu": toy.GLOBAL_BATCH // toy.WORLD,
    "gradient_clipping": toy.MAX_GRAD_NORM,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own one would have to be compiled
    "checkpoint": {"tag_validation": "Fail"},  # ranks that disagree on the tag: an error, by default a warning
}


def rotate(checkpoints: Path) -> None:
    """DeepSpeed keeps all checkpoints. After a save, `latest` names the new one, so the old ones may go."""
    folders = sorted(checkpoints.glob("global_step*"), key=lambda folder: int(folder.name[len("global_step") :]))
    for folder in folders[: -toy.KEEP]:
        shutil.rmtree(folder)


def main(directory: Path) -> None:
    deepspeed.init_distributed("gloo", timeout=toy.TIMEOUT)  # its own groups do not get it: loops.NOTES
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.LEARNING_RATE, weight_decay=toy.WEIGHT_DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, toy.WARMUP_STEPS, toy.STEPS)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=CONFIG)
    dataset, checkpoints = toy.rows(), directory / "checkpoints"
    sampler = DistributedSampler(dataset, toy.WORLD, toy.RANK, seed=toy.SEED)
    loader = DataLoader(dataset, batch_size=toy.GLOBAL_BATCH // toy.WORLD, sampler=sampler)

    # (None, None) when there is no `latest`: the documented way to find out that this is the first start
    _, client_state = engine.load_checkpoint(str(checkpoints))
    step = client_state["step"] if client_state else 0
    while step < toy.STEPS:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number < done or step == toy.STEPS:
                continue
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            step += 1
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            toy.record(directory, step, mean.item() / toy.WORLD)
            if step % toy.SAVE_EVERY == 0:
                engine.save_checkpoint(str(checkpoints), client_state={"step": step})
                if toy.RANK == 0:
                    rotate(checkpoints)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
