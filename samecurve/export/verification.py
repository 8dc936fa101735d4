"""Loads an export in a new process, by transformers alone, and compares its outputs with the trained model's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from samecurve.data.micro_batch import MicroBatch
from samecurve.errors import CheckpointError, NumericError
from samecurve.export import reload
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.precision import DTYPES
from samecurve.specs.tasks import TASKS
from samecurve.storage.atomic import storage_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

ROWS, LENGTH = 2, 32
# Parts of the largest output. fp32 has a relative rounding error of 2^-24 = 6e-8, which the sums and layers of a model
# make a few hundred times larger. A wrong export differs by far more.
TOLERANCE = 1e-4
# In a lower precision a difference may be this many times what the precision itself changes in the loaded model: both
# are the largest of many rounding errors, and other kernels round at other places.
ROUNDING_FACTOR = 8
FP8_FACTOR = 2**4  # bf16 has 7 bits of mantissa, e4m3 has 3
_OF_THE_RUN = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_", "TORCHELASTIC_", "PET_", "GROUP_", "ROLE_", "MASTER_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def sample_batch(skeleton: PreTrainedModel, recipe: Recipe) -> MicroBatch:
    """Draw token ids from the whole vocabulary, (ROWS, LENGTH) or shorter, the same on every rank."""
    embedding = skeleton.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)  # whose size a config may keep at any depth
    length = min(LENGTH, recipe.batch.sequence_length)
    ids = torch.randint(embedding.num_embeddings, (ROWS, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    if TASKS[recipe.task].auto_class == "AutoModelForCausalLM":
        inputs["position_ids"] = torch.arange(length).repeat(ROWS, 1)
    else:
        inputs["attention_mask"] = torch.ones_like(ids)
    return MicroBatch(inputs, {"labels": torch.full_like(ids, IGNORE_INDEX)})


@dataclass
class Verification:
    """Check of an export, to be called with its folder before the folder gets its final name.

    Attributes:
        recipe: recipe of the run.
        batch: result of `sample_batch`.
        expected: outputs of the trained model for the batch, (ROWS, ...), fp32 on the CPU.
        rejected: where a folder that fails the check is moved to.
        result: a sentence with the largest difference, once the check has passed.
    """

    recipe: Recipe
    batch: MicroBatch
    expected: Tensor
    rejected: Path
    result: str = ""

    def __call__(self, folder: Path) -> None:
        """Verify `folder` and set `result`.

        Raises:
            CheckpointError: the folder cannot be loaded.
            NumericError: its outputs differ from the trained model's by more than the precision explains.
            StorageError: the outputs cannot be written to a temporary file.
        """
        try:
            reloaded = self._reload(folder)
        except _ReloadError as error:
            self._reject(folder)
            raise CheckpointError(
                f"{self.rejected}: the exported model was moved here, because transformers cannot load it:\n{error}\n"
                f"{self._safe}"
            ) from None
        factor = ROUNDING_FACTOR * (1 if self.recipe.fp8 == "off" else FP8_FACTOR)
        difference, limit = reloaded["difference"], max(TOLERANCE * reloaded["largest"], factor * reloaded["rounding"])
        kind = "states" if TASKS[self.recipe.task].auto_class == "AutoModel" else "logits"
        loaded_by = f"transformers {reloaded['transformers']}"
        if not difference <= limit:  # also for nan
            self._reject(folder)
            raise NumericError(
                f"{self.rejected}: the exported model was moved here, because it is not the trained one: loaded by "
                f"{loaded_by}, its {kind} differ from the trained model's by up to {difference:.1e}; "
                f"{limit:.1e} is allowed in {self.recipe.precision}. {self._safe}"
            )
        compared = f"{kind} differ by at most {difference:.1e} (allowed: {limit:.1e})"
        self.result = f"export reloaded by {loaded_by}: {compared}"

    @property
    def _safe(self) -> str:
        if self.recipe.checkpoint.every_steps:
            return (
                "The run's checkpoints are complete; with export.verify=off the same command exports without this "
                "check."
            )
        return (
            "The last step has no checkpoint (checkpoint.every_steps is 0), so this folder has the only copy of the "
            "trained weights; the same command trains again."
        )

    def _reload(self, folder: Path) -> dict:
        """Run reload.py in a new process and return the object that it prints."""
        recipe = self.recipe
        asked = {
            "auto_class": TASKS[recipe.task].auto_class,
            "trust_remote_code": recipe.model.trust_remote_code,
            "dtype": DTYPES[recipe.precision],
        }
        with storage_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as directory:
            tensors = Path(directory) / "tensors.safetensors"
            save_file({**self.batch.inputs, reload.EXPECTED: self.expected.contiguous()}, tensors)
            command = [sys.executable, reload.__file__, str(folder), str(tensors), json.dumps(asked)]
            # Of no rank: transformers loads a model differently under FSDP's or DeepSpeed's variables.
            kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_RUN) and k not in _RANKS}
            # Without a GPU, which is full of the run's weights, without downloads, and without the script's folder on
            # the path, whose modules could hide others.
            kept |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
            done = subprocess.run(command, env=kept, capture_output=True, text=True)
        if done.returncode:
            raise _ReloadError("\n".join(done.stderr.strip().splitlines()[-5:]))
        return json.loads(done.stdout.splitlines()[-1])

    def _reject(self, folder: Path) -> None:
        with storage_errors(self.rejected):
            shutil.rmtree(self.rejected, ignore_errors=True)
            os.rename(folder, self.rejected)


class _ReloadError(Exception):
    """The new process failed; the message is the end of its output."""
