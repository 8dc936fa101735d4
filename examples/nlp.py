"""Classify sentences in a loop of one's own. Against a script for Accelerate one line differs: the import.

    accelerate launch --config_file configs/fsdp.yaml --num_processes 2 examples/nlp.py --project_dir runs/nlp

The same command again, also under another strategy or with another number of processes, goes on from the newest
checkpoint. Each step prints the same numbers under all of them. Python finds the package after `pip install -e .` in
the repository, or with PYTHONPATH=. for a script that stays in it.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from samecurve import Accelerator


def sentences(count: int, seed: int) -> list[dict]:
    """Rows of random tokens, whose label says whether more of them are below 50 than above."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 100, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": ((row < 50).sum() > 6).long()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", default="runs/nlp")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    arguments = parser.parse_args()
    project = ProjectConfiguration(arguments.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision, gradient_accumulation_steps=2, project_config=project
    )
    set_seed(7)
    # batch_size is that of all processes together; dropout would draw other masks on another number of them
    train, held_out = DataLoader(sentences(70, 1), batch_size=8, shuffle=True), DataLoader(sentences(30, 2), 8)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes, **drops))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=15)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)
    if any(Path(arguments.project_dir).glob("checkpoints/checkpoint_*")):
        accelerator.load_state()

    for epoch in range(train.iteration, 3):  # a loaded loader knows its epoch
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
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
        losses, right = [], []
        for batch in held_out:
            with torch.no_grad():
                logits = model(**batch).logits
            rows = cross_entropy(logits, batch["labels"], reduction="none"), logits.argmax(-1) == batch["labels"]
            for gathered, of_rows in zip((losses, right), accelerator.gather_for_metrics(rows), strict=True):
                gathered.append(of_rows)
        loss, accuracy = torch.cat(losses).mean(), torch.cat(right).float().mean()
        accelerator.print(f"epoch {epoch} eval_loss {loss:.7f} accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
