"""Trains a small reward model on texts of uneven lengths."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForSequenceClassification

PAD, END = 0, 1


def collate(rows):
    texts = [row["tokens"] for row in rows]
    mask = [torch.ones(len(text), dtype=torch.long) for text in texts]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(mask, batch_first=True),
        "labels": torch.tensor([row["reward"] for row in rows]),
    }


accelerator = Accelerator()
set_seed(5)
rows = []
for number in range(48):
    tokens = torch.randint(2, 60, (4 + number * 5 % 11,), generator=torch.Generator().manual_seed(number))
    tokens[-1] = END
    rows.append({"tokens": tokens, "reward": float(tokens.sum() % 7)})
loader = DataLoader(rows, batch_size=4, collate_fn=collate)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForSequenceClassification(LlamaConfig(vocab_size=60, num_labels=1, pad_token_id=PAD, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
