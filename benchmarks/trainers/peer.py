"""Trains the config.yaml of each folder by another trainer's own command: TRAINER FOLDER...

Losses and gradient norms are in trainer_state.json of the last checkpoint. In TRL a file of rows takes the place of a
data set's name, and the weights in adapter/ that of an adapter drawn by chance.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType


def llama_factory() -> Callable[[], None]:
    audio = sys.modules["torchaudio"] = ModuleType("torchaudio")  # imported there, and used for audio alone
    audio.__spec__ = ModuleSpec("torchaudio", None)
    from llamafactory.extras.env import VERSION
    from llamafactory.train.tuner import run_exp

    print(f"LLaMA-Factory {VERSION}, transformers {version('transformers')}, torch {version('torch')}")

    def train() -> None:
        sys.argv[1:] = ["config.yaml"]
        run_exp()

    return train


def trl(method: str) -> Callable[[], None]:
    import datasets
    import transformers
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    load_dataset, train_model = datasets.load_dataset, transformers.Trainer.train

    def train_from(self, *arguments, **options):
        if Path("adapter").is_dir():
            set_peft_model_state_dict(self.model, load_file("adapter/adapter_model.safetensors"))
        return train_model(self, *arguments, **options)

    datasets.load_dataset = lambda path, **_: load_dataset("json", data_files=path)
    transformers.Trainer.train = train_from
    script = importlib.import_module(f"trl.scripts.{method}")
    print(f"TRL {version('trl')}, transformers {version('transformers')}, torch {version('torch')}")
    return lambda: script.main(*script.make_parser().parse_args_and_config(["--config", "config.yaml"]))


def main(trainer: str, *folders: str) -> None:
    train = llama_factory() if trainer == "llama-factory" else trl(trainer)
    for folder in folders:
        os.chdir(folder)
        child = multiprocessing.get_context("fork").Process(target=train)
        child.start()
        child.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
