"""Accelerate's loop for texts of uneven lengths, whose loss is divided by the labels of all processes.

After https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, "training samples of variable size",
with the checkpoints of https://huggingface.co/docs/accelerate/usage_guides/checkpoint.
"""

import math
import sys
from contextlib import nullcontext

import torch
import toy
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, get_constant_schedule

settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
accelerator = Accelerator(gradient_accumulation_steps=toy.ACCUMULATED)
set_seed(toy.SEED)
collate = DataCollatorForSeq2Seq(toy.tokenizer())
train = DataLoader(toy.encoded(toy.ROWS, 1), batch_size=toy.BATCH, shuffle=True, collate_fn=collate)
tests = DataLoader(toy.encoded(toy.TESTS, 2), batch_size=toy.BATCH, collate_fn=collate)
model = AutoModelForCausalLM.from_pretrained(toy.model_folder())
optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
schedule = get_constant_schedule(optimizer)
model, optimizer, train, tests, schedule = accelerator.prepare(model, optimizer, train, tests, schedule)

updates_per_epoch = math.ceil(len(train) / toy.ACCUMULATED)
updates = 0
if checkpoint:
    accelerator.load_state(checkpoint)
    updates = int(checkpoint.rpartition("_")[2])
first_epoch, skipped = divmod(updates, updates_per_epoch)
for epoch in range(first_epoch, math.ceil(toy.STEPS / updates_per_epoch)):
    model.train()
    is_resumed = epoch == first_epoch and skipped > 0
    batches = iter(accelerator.skip_first_batches(train, skipped * toy.ACCUMULATED) if is_resumed else train)
    for update in range(skipped if is_resumed else 0, updates_per_epoch):
        size = min(toy.ACCUMULATED, len(train) - update * toy.ACCUMULATED)
        step = [next(batches) for _ in range(size)]
        count = sum(batch["labels"].ne(-100).sum() for batch in step)
        count = accelerator.gather(count).sum().item()
        for index, batch in enumerate(step):
            is_last = index == size - 1
            with nullcontext() if is_last or accelerator.num_processes == 1 else model.no_sync():
                loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
                accelerator.backward(loss * toy.ACCUMULATED * accelerator.num_processes)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        updates += 1
        if updates == toy.SAVED_AT:
            accelerator.save_state(f"{settings['output_dir']}/step_{updates}")
        if updates == toy.STEPS:
            break

model.eval()
losses = []
for batch in tests:
    with torch.no_grad():
        loss = model(**batch, use_cache=False).loss
    losses.append(accelerator.gather_for_metrics(loss.repeat(toy.BATCH)))
accelerator.log({"eval_loss": torch.cat(losses).mean().item()})
accelerator.unwrap_model(model).save_pretrained(
    settings["output_dir"],
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
    state_dict=accelerator.get_state_dict(model),
)
accelerator.end_training()
