"""Fine-tunes a small Llama on prompts and answers with transformers.Trainer."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(3)
rows = []
for index, tokens in enumerate(torch.randint(1, 100, (64, 16), generator=torch.Generator().manual_seed(1))):
    labels = tokens.clone()
    prompt = index * 5 % 13
    labels[:prompt] = -100
    rows.append({"input_ids": tokens, "labels": labels})
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 8, "report_to": "none"}
arguments = TrainingArguments(f"{__file__}.out", learning_rate=1e-3, save_strategy="no", disable_tqdm=True, **settings)
Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)), arguments, train_dataset=rows).train()
