"""A script that exports its model by save_pretrained and reads it back: exports_probe.py fsdp|zero3 FOLDER.

All processes save, the main one alone reads. It prints how far the export is from the trained weights.
"""

from __future__ import annotations

import sys

import torch
from states_probe import start
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.errors import ConfigurationError


def main() -> None:
    strategy, folder = sys.argv[1:]
    accelerator = start(strategy)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 20, (4, 6))]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 0.1), DataLoader(rows, batch_size=4)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if strategy == "zero3":
                try:
                    accelerator.backward(model(**batch).loss)
                except ConfigurationError as error:
                    accelerator.print("REFUSED", error, flush=True)
            optimizer.step()
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        read = LlamaForCausalLM.from_pretrained(folder).state_dict()
        print("APART", max(float((read[name] - weights[name]).abs().max()) for name in read), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
