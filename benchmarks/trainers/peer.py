"""Trains by another trainer's own command, under that trainer's versions: TRAINER FILE [ADAPTER].

Losses and gradient norms are in OUTPUT_DIR/trainer_state.json of the last checkpoint. A file of rows takes the place of
a data set by name in TRL, and the adapter's weights that of those drawn by chance.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def main(trainer: str, file: str, adapter: str = "") -> None:
    if trainer == "llama-factory":
        audio = sys.modules["torchaudio"] = ModuleType("torchaudio")  # imported there, and used for audio alone
        audio.__spec__ = ModuleSpec("torchaudio", None)
        from llamafactory.train.tuner import run_exp

        sys.argv[1:] = [file]
        return run_exp()

    import datasets
    import transformers
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    load_dataset, train = datasets.load_dataset, transformers.Trainer.train

    def train_from(self, *arguments, **options):
        if adapter:
            weights = load_file(Path(adapter, "adapter_model.safetensors"))
            set_peft_model_state_dict(self.model, weights)
        return train(self, *arguments, **options)

    datasets.load_dataset = lambda path, **_: load_dataset("json", data_files=path)
    transformers.Trainer.train = train_from
    script = importlib.import_module(f"trl.scripts.{trainer}")
    script.main(*script.make_parser().parse_args_and_config(["--config", file]))


if __name__ == "__main__":
    main(*sys.argv[1:])
