"""A training step as one would write it by hand: no framework, nothing left out and nothing put in.

    python bare_loop.py RECIPE OUTPUT.json [--compile] [--chunked] [key=value ...]

--chunked: with samecurve's chunked head, attention and settings of malloc, which is the step that its framework goes
around.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rows
import torch

from samecurve.config.loader import load_recipe
from samecurve.engines.start import keep_freed_memory
from samecurve.losses.chunked_cross_entropy import TokenSums, install_chunked_head, trained_positions
from samecurve.losses.cross_entropy import token_loss_sum
from samecurve.optim.parameter_groups import parameter_groups, roles_of


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    record, model = rows.Record(arguments.output), rows.model(recipe, ours=arguments.chunked)
    if arguments.chunked:
        keep_freed_memory()
    settings = recipe.optimizer
    groups = parameter_groups(model.named_parameters(), settings, roles_of(model))
    optimizer = torch.optim.AdamW(groups, settings.learning_rate, settings.betas, settings.epsilon, fused=True)
    if arguments.chunked:
        install_chunked_head(model)
    if arguments.compile and arguments.chunked:
        for layer in model.model.layers:
            layer.compile()
    elif arguments.compile:
        model.compile()
    steps = rows.batches(recipe)
    record.start()
    for step, micro_batches in enumerate(steps, start=1):
        tokens, loss_sum = sum(map(rows.trained, micro_batches)), 0.0
        for batch in micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16"):
                loss = _loss(model, batch, arguments.chunked)
            (loss / tokens).backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / recipe.schedule.warmup_steps)
        optimizer.step()
        optimizer.zero_grad()
        record.step(loss_sum / tokens, tokens)
    record.write()


def _loss(model, batch, chunked: bool) -> torch.Tensor:
    if chunked:
        return model(**batch.inputs, sums=TokenSums(token_loss_sum, batch.targets, trained_positions(batch.labels)))
    return token_loss_sum(model(**batch.inputs).logits, batch.labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--chunked", action="store_true")
    main(parser.parse_intermixed_args())
