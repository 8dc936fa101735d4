"""Tag tokens with a loss of one's own: focal loss, two groups of learning rates, frozen embeddings.

    accelerate launch --config_file configs/zero2.yaml --num_processes 2 examples/token_classification.py

A loss that Accelerator cannot know is exact in two steps: `count` says how many units a batch has, and `backward` is
given their sum. Installation, and how a run goes on: as in examples/nlp.py.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

from samecurve import Accelerator


def sentences(count: int, seed: int) -> list[dict]:
    """Rows of 3 to 12 random tokens, padded; a token's tag is its remainder by 3."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        tokens = torch.randint(1, 30, (12,), generator=generator)
        shown = torch.arange(12) < torch.randint(3, 13, (1,), generator=generator)
        tags = (tokens % 3).masked_fill(~shown, -100)
        rows.append({"input_ids": tokens * shown, "attention_mask": shown.long(), "labels": tags})
    return rows


def focal_loss(logits: torch.Tensor, tags: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    """Return (1 - p)^gamma * -log p of each tag, of shape (rows, tokens); 0 where it is -100 (Lin et al. 2017)."""
    entropy = cross_entropy(logits.transpose(1, 2), tags, reduction="none")
    return (1 - torch.exp(-entropy)) ** gamma * entropy


def count_tags(batch: dict) -> int:
    return int((batch["labels"] != -100).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", default="runs/token_classification")
    project_dir = parser.parse_args().project_dir
    project = ProjectConfiguration(project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(count=count_tags, gradient_accumulation_steps=2, project_config=project)
    set_seed(7)
    # the last batch has one row, so that one of two processes has none
    train, held_out = DataLoader(sentences(65, 1), batch_size=8, shuffle=True), DataLoader(sentences(30, 2), 8)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForTokenClassification(BertConfig(vocab_size=30, num_labels=3, **sizes, **drops))
    model.bert.embeddings.requires_grad_(False)
    head = {"params": model.classifier.parameters(), "lr": 1e-2}
    optimizer = torch.optim.AdamW([{"params": model.bert.encoder.parameters()}, head], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)
    if any(Path(project_dir).glob("checkpoints/checkpoint_*")):
        accelerator.load_state()

    for epoch in range(train.iteration, 3):  # a loaded loader knows its epoch
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = focal_loss(model(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"]).sum()
                accelerator.backward(loss, reduction="sum")
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step = scheduler.scheduler.last_epoch
                accelerator.print(f"step {step} grad_norm {norm.item():.7f}")
                if step % 4 == 0:
                    accelerator.save_state()
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                rows = focal_loss(model(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"])
            losses.append(accelerator.gather_for_metrics((rows, batch["labels"] != -100)))
        total, tags = (torch.cat(parts).sum() for parts in zip(*losses, strict=True))
        accelerator.print(f"epoch {epoch} eval_loss {total / tags:.7f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
