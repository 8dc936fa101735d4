"""The training of a recipe's twin as a plain loop of transformers and torch: python judge.py

Beside it are settings.json, model/ (and adapter/), and rows.jsonl, a line for each step with its texts as token ids and
labels, -100 where nothing is trained. Prints loss and gradient norm of each step, and writes the weights.
"""

import argparse
import json
from fnmatch import fnmatch
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser()
parser.add_argument("--other-rounding", action="store_true", help="texts in reverse, attention step by step")
parser.add_argument("--products", default="float32", help="dtype of matrix products; weights are in fp32")
parser.add_argument("--weights", default=HERE / "weights.safetensors", help="file for the trained weights")
asked = parser.parse_args()
settings = json.loads((HERE / "settings.json").read_text())

auto_class = getattr(transformers, settings["auto_class"])
attention = {"attn_implementation": "eager"} if asked.other_rounding else {}
model = auto_class.from_pretrained(HERE / "model", dtype=torch.float32, **attention)
if (HERE / "adapter").is_dir():
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, HERE / "adapter", is_trainable=True)
model.train()  # the twin has no dropout

groups = []
for name, weight in model.named_parameters():
    plain = name.replace(".default.", ".")
    own = next((g for g in settings["groups"] if fnmatch(f".{plain}", f"*.{g['pattern']}")), {})
    weight.requires_grad_(weight.requires_grad and not own.get("frozen", False))
    decay = own.get("weight_decay", settings["weight_decay"]) if weight.ndim > 1 else 0.0
    factor = settings["lora_b_factor"] if ".lora_B." in name else 1.0
    factor = own["learning_rate"] / settings["learning_rate"] if "learning_rate" in own else factor
    groups += [{"params": [weight], "weight_decay": decay, "factor": factor}] if weight.requires_grad else []
optimizer = torch.optim.AdamW(groups, betas=settings["betas"], eps=settings["epsilon"])
for line, rate in zip((HERE / "rows.jsonl").open(), settings["rates"], strict=True):
    texts = json.loads(line)
    count = sum(label != -100 for text in texts for label in text["labels"])
    loss = 0.0
    for text in reversed(texts) if asked.other_rounding else texts:
        ids, labels = torch.tensor([text["input_ids"]]), torch.tensor([text["labels"]])
        with torch.autocast("cpu", getattr(torch, asked.products), enabled=asked.products != "float32"):
            mean = model(input_ids=ids, labels=labels).loss  # over the labels of this text
        part = mean * (labels != -100).sum() / count
        part.backward()
        loss += part.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"]).item()
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps({"loss": loss, "grad_norm": norm, "tokens": count}), flush=True)
save_file({name: weight.detach().clone() for name, weight in model.named_parameters()}, asked.weights)
