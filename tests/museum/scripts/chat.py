"""Fine-tunes a small Llama on conversations with Accelerate."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
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


accelerator = Accelerator(
    gradient_accumulation_steps=ACCUMULATED, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(7)
rows = [encode(conversation(number)) for number in range(48)]
loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), tie_word_embeddings="tied" in sys.argv, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
updates = EPOCHS * len(loader) // ACCUMULATED
schedule = get_linear_schedule_with_warmup(optimizer, 0, updates)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _ in range(EPOCHS):
    batches = iter(loader)
    for _ in range(len(loader) // ACCUMULATED):
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
