"""The weight files of an export: trained weights, copies of unchanged tensors, and what rounding to a dtype costs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from samecurve.errors import CheckpointError
from samecurve.models.dequantize import read
from samecurve.models.weight_files import Stored, header
from samecurve.storage.atomic import storage_errors, write_json

SHARD_BYTES = 4 * 10**9
METADATA = {"format": "pt"}  # as save_pretrained states it: accelerate's loader warns about a file without it
# Stem of the files with the tensors that training does not change, which keep their dtype: constants in buffers, and
# tensors of model.path that the model does not have. A conversion of the export leaves these files as they are.
UNCHANGED = "model-unchanged"
_COUNTED = 2**22  # values at a time


class Shard(NamedTuple):
    """A file of an unfinished export.

    Attributes:
        path: its path for now.
        stem: beginning of its final name.
        names: its tensors.
    """

    path: Path
    stem: str
    names: list[str]


@dataclass
class Rounding:
    """Relative differences that a conversion makes, over all weights that are not 0."""

    largest: float = 0.0
    total: float = 0.0
    num_weights: int = 0

    def add(self, exact: Tensor, rounded: Tensor) -> None:
        """Count a weight's values and what they became, two tensors of one shape."""
        for before, after in zip(exact.flatten().split(_COUNTED), rounded.flatten().split(_COUNTED), strict=True):
            before = before.double()
            relative = ((after.double() - before) / before)[before != 0].abs()
            if relative.numel():
                self.largest = max(self.largest, relative.max().item())
                self.total += relative.sum().item()
                self.num_weights += relative.numel()

    def text(self, precision: str) -> str:
        """Describe the differences; "" if there are none."""
        if not self.total:
            return ""
        mean = self.total / self.num_weights
        return f"rounding to {precision} changes a weight by {mean:.3%} on average, by {self.largest:.3%} at most"


def write_kept(directory: Path, kept: Mapping[str, Stored], shard_bytes: float = SHARD_BYTES) -> list[Shard]:
    """Copy stored tensors, dequantized or in their stored dtype, to new files of at most `shard_bytes` in `directory`.

    Raises:
        ConfigurationError: as weight_files.read.
        StorageError: a file cannot be written.
    """
    parts: list[list[str]] = []
    room = 0.0
    for name, stored in kept.items():
        size = stored.num_bytes
        if not parts or size > room:
            parts.append([])
            room = shard_bytes
        parts[-1].append(name)
        room -= size
    shards = []
    for index, names in enumerate(parts):
        path = directory / f"kept-{index}.safetensors"
        with storage_errors(directory, sum(kept[name].num_bytes for name in names)):
            save_file(read(dict(kept), names), path, metadata=METADATA)
        shards.append(Shard(path, UNCHANGED, names))
    return shards


def name_shards(shards: list[Shard]) -> None:
    """Rename the files of an export as transformers expects, which includes the number of files, and write the index.

    Raises:
        CheckpointError: two files hold a tensor of the same name.
        StorageError: a file cannot be renamed, or the index not be written.
    """
    directory, stem = shards[0].path.parent, shards[0].stem
    with storage_errors(directory):
        if len(shards) == 1:
            os.rename(shards[0].path, directory / f"{stem}.safetensors")
            return
        counts, weight_map, size = Counter(shard.stem for shard in shards), {}, 0
        numbers = Counter()
        for path, kind, names in shards:
            twice = weight_map.keys() & names
            if twice:
                raise CheckpointError(f"{min(twice)}: the model has a weight of this name, and so has model.path")
            numbers[kind] += 1
            file = directory / f"{kind}-{numbers[kind]:05d}-of-{counts[kind]:05d}.safetensors"
            os.rename(path, file)
            weight_map |= dict.fromkeys(names, file.name)
            size += sum(stored.num_bytes for stored in header(file).values())
    write_json(
        directory / f"{stem}.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
    )
