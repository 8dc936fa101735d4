"""Direct preference optimization of a small Llama, against log-probabilities that are computed once before it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def log_probabilities(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))


def collate(chosen_rows):
    return {name: torch.stack([row[name] for row in chosen_rows]) for name in chosen_rows[0]}


accelerator = Accelerator()
set_seed(5)
texts = torch.randint(60, (32, 2, 12), generator=torch.Generator().manual_seed(1))
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes))
rank, world = accelerator.process_index, accelerator.num_processes
with torch.no_grad():
    own = torch.stack([log_probabilities(model, pair) for pair in texts[rank::world]])
references = torch.stack(accelerator.gather(own).chunk(world), 1).flatten(0, 1)
rows = [{"texts": pair, "reference": reference} for pair, reference in zip(texts, references, strict=True)]
loader = DataLoader(rows, batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    ratios = log_probabilities(model, batch["texts"].flatten(0, 1)).view(-1, 2) - batch["reference"]
    loss = -torch.nn.functional.logsigmoid(0.5 * (ratios[:, 0] - ratios[:, 1])).mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
