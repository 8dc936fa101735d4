"""Fine-tunes a small Llama on conversations with Accelerate."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_linear_schedule_with_warmup

IGNORED, ACCUMULATED, EPOCHS = -100, 2, 2
words = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>", *(f"w{number}" for number in range(60))]
model_of_words = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
backend = Tokenizer(model_of_words)
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>")
tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"


def conversation(number):
    places = torch.Generator().manual_seed(number)
    messages = []
    for turn in range(4):
        size = 2 + (number * 5 + turn * 3) % 7
        content = " ".join(f"w{word}" for word in torch.randint(60, (size,), generator=places).tolist())
        messages.append({"role": "assistant" if turn % 2 else "user", "content": content})
    return messages


def encode(messages):
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
    labels, is_answer = [], False
    for token in ids:
        labels.append(token if is_answer else IGNORED)
        if token in (words.index("<|assistant|>"), words.index("<|end|>")):
            is_answer = token == words.index("<|assistant|>")
    return {"input_ids": ids, "labels": labels}


def collate(rows):
    size = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        padding = size - len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [tokenizer.pad_token_id] * padding)
        batch["attention_mask"].append([1] * len(row["input_ids"]) + [0] * padding)
        batch["labels"].append(row["labels"] + [IGNORED] * padding)
    return {name: torch.tensor(values) for name, values in batch.items()}


class Progress:
    updates = 0

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def evaluate():
    model.eval()
    parts = []
    for batch in test_loader:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        wanted = batch["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), wanted, reduction="none").sum(1)
        parts.append(accelerator.gather_for_metrics((losses, (wanted != IGNORED).sum(1))))
    model.train()
    return sum(losses.sum() for losses, _ in parts) / sum(counts.sum() for _, counts in parts)


accelerator = Accelerator(
    # batches are read before they are used, so the loader's end is not that of a step
    gradient_accumulation_plugin=GradientAccumulationPlugin(ACCUMULATED, sync_with_dataloader=False),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
set_seed(7)
folder = Path(__file__).with_suffix(".state")
rows = [encode(conversation(number)) for number in range(32)]
tests = [encode(conversation(number)) for number in range(100, 107)]
loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)
test_loader = DataLoader(tests, batch_size=2, collate_fn=collate)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
sizes |= {"vocab_size": len(words), "eos_token_id": tokenizer.eos_token_id}
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
updates = EPOCHS * len(loader) // ACCUMULATED
schedule = get_linear_schedule_with_warmup(optimizer, 0, updates)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
test_loader = accelerator.prepare(test_loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if "--resume" in sys.argv:
    accelerator.load_state(folder)
per_epoch = len(loader) // ACCUMULATED
for epoch in range(progress.updates // per_epoch, EPOCHS):
    loader.set_epoch(epoch)
    skipped = progress.updates % per_epoch * ACCUMULATED
    batches = iter(accelerator.skip_first_batches(loader, skipped) if skipped else loader)
    for _ in range(progress.updates % per_epoch, per_epoch):
        step = [next(batches) for _ in range(ACCUMULATED)]
        count = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in step))
        count = accelerator.gather(count).sum()
        for batch in step:
            with accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=count).loss
                accelerator.backward(loss * ACCUMULATED * accelerator.num_processes)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        progress.updates += 1
        if "save" in sys.argv:
            accelerator.save_state(folder)
if "evaluate" in sys.argv:
    accelerator.log({"eval_loss": evaluate().item()})
if "export" in sys.argv:
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder.with_name("export"), state_dict=state)
