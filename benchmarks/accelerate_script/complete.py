"""Tag tokens in a script for Accelerate: accumulation, checkpoints by steps, a resume within an epoch, a tracker.

In the manner of Accelerate's complete_nlp_example.py, written anew. The class Accelerator is imported from the module
that a flag names; nothing else depends on it.

    torchrun --nproc_per_node 2 complete.py --batch_size 4
    torchrun --nproc_per_node 2 complete.py --batch_size 8 --accelerator_from samecurve
"""

import argparse
import importlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification, get_linear_schedule_with_warmup


def sentences(count: int, seed: int) -> list[dict]:
    """Rows of 12 random tokens, of which 1 to 12 have a label: their remainder by 3."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        tokens = torch.randint(1, 30, (12,), generator=generator)
        labelled = torch.arange(12) < torch.randint(1, 13, (1,), generator=generator)
        rows.append({"input_ids": tokens, "labels": (tokens % 3).masked_fill(~labelled, -100)})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator_from", default="accelerate", help="module of the class Accelerator")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--split_batches", action="store_true", help="batch_size is that of all processes together")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--checkpointing_steps", type=int, help="batches between checkpoints")
    parser.add_argument("--resume_from_checkpoint", help="folder step_N")
    parser.add_argument("--output_dir", default="runs/complete")
    return parser.parse_args()


def evaluate(accelerator: Accelerator, model: torch.nn.Module, held_out: DataLoader) -> float:
    """Return the mean loss over the labelled tokens of all rows."""
    model.eval()
    losses = []
    for batch in held_out:
        with torch.no_grad():
            logits = model(**batch).logits
        loss = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        losses.append(accelerator.gather_for_metrics((loss, batch["labels"] != -100)))
    total, labels = (torch.cat(parts).sum() for parts in zip(*losses, strict=True))
    return (total / labels).item()


def main() -> None:
    args = parse()
    accelerator_class = importlib.import_module(args.accelerator_from).Accelerator
    options = {}
    if args.split_batches:
        options["dataloader_config"] = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = accelerator_class(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard",
        project_dir=args.output_dir,
        **options,
    )
    accelerator.init_trackers("logs", {"batch_size": args.batch_size, "num_epochs": args.num_epochs})
    set_seed(7)
    train = DataLoader(sentences(79, 1), batch_size=args.batch_size, shuffle=True)
    held_out = DataLoader(sentences(30, 2), batch_size=args.batch_size)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForTokenClassification(BertConfig(vocab_size=30, num_labels=3, **sizes, **drops))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = len(train) * args.num_epochs // args.gradient_accumulation_steps
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)

    batches, updates, starting_epoch, resume_batch = 0, 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        batches = int(Path(args.resume_from_checkpoint).name.removeprefix("step_"))
        starting_epoch, resume_batch = divmod(batches, len(train))
        per_epoch = -(-len(train) // args.gradient_accumulation_steps)
        updates = starting_epoch * per_epoch + resume_batch // args.gradient_accumulation_steps

    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        train.set_epoch(epoch)
        active = train
        if epoch == starting_epoch and resume_batch:
            active = accelerator.skip_first_batches(train, resume_batch)
        for batch in active:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            batches += 1
            if accelerator.sync_gradients:
                updates += 1
                accelerator.log({"grad_norm": norm.item()}, step=updates)
            if args.checkpointing_steps and batches % args.checkpointing_steps == 0:
                accelerator.save_state(f"{args.output_dir}/step_{batches}")

        accelerator.log({"eval_loss": evaluate(accelerator, model, held_out)}, step=updates)
    accelerator.end_training()


if __name__ == "__main__":
    main()
