"""Accelerate's loop with `accumulate`, a linear schedule and checkpoints.

After https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, "the finished code", with the schedule
and the checkpoints of examples/complete_nlp_example.py of its repository.
"""

import sys

import torch
import toy
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, get_linear_schedule_with_warmup

EPOCHS = 2
settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
accelerator = Accelerator(gradient_accumulation_steps=toy.ACCUMULATED)
set_seed(toy.SEED)
collate = DataCollatorForSeq2Seq(toy.tokenizer())
train = DataLoader(toy.encoded(toy.ROWS, 1), batch_size=toy.BATCH, shuffle=True, collate_fn=collate)
model = AutoModelForCausalLM.from_pretrained(toy.model_folder())
optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train) * EPOCHS // toy.ACCUMULATED)
model, optimizer, train, schedule = accelerator.prepare(model, optimizer, train, schedule)

batches = 0
if checkpoint:
    accelerator.load_state(checkpoint)
    batches = int(checkpoint.rpartition("_")[2])
first_epoch, skipped = divmod(batches, len(train))
for epoch in range(first_epoch, EPOCHS):
    model.train()
    is_resumed = epoch == first_epoch and skipped > 0
    for batch in accelerator.skip_first_batches(train, skipped) if is_resumed else train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        batches += 1
        if batches == toy.SAVED_AT * toy.ACCUMULATED:
            accelerator.save_state(f"{settings['output_dir']}/step_{batches}")
accelerator.end_training()
