"""`export`: converts a run's export or one of its checkpoints to a model folder of another dtype, with a card."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from samecurve.checkpoint.format import CheckpointReader
from samecurve.checkpoint.resume import read_state, refusals
from samecurve.config.schema import Recipe
from samecurve.errors import CheckpointError, DataError, NumericError
from samecurve.export.hf_export import ExportTarget, export, out_of_range, put_in_place
from samecurve.export.model_card import ExportInfo, write_card
from samecurve.export.push import Push
from samecurve.export.weight_shards import METADATA, UNCHANGED, Rounding
from samecurve.interfaces.engine import dtype_name
from samecurve.interfaces.region import Region
from samecurve.interfaces.sharded_state import QUEUE
from samecurve.interfaces.task import identity
from samecurve.models.lora import trained_shapes
from samecurve.models.weight_files import header, indexed_files, read, weight_files
from samecurve.models.weights import constant_tensors, frozen_tensors, kept_tensors
from samecurve.specs.precision import PRECISIONS
from samecurve.storage.atomic import json_values, storage_errors, write_json
from samecurve.storage.filesystem import check_links
from samecurve.storage.records import read_record
from samecurve.tasks import registry
from samecurve.tasks.task_skeleton import skeleton_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.interfaces.task import Task


def run(
    directory: Path, source: Path, output: Path, made: ExportInfo, recipe: Recipe | None, push: Push | None = None
) -> int:
    """Run the command `export`. Returns the exit code.

    `source` is the run's export, or a checkpoint, whose `recipe` is then given; `output` is the new folder.
    """
    if recipe is None:
        from_export(directory, source, output, made)
    else:
        from_checkpoint(directory, source, recipe, output, made)
    finish(source, output, PRECISIONS[made.dtype], push)
    return 0


def finish(source: Path, output: Path, precision: str, push: Push | None) -> None:
    """Print what was written, and upload it if asked to. Raises as Push.upload."""
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{source} in {precision}: {output} ({size / 1e6:,.1f} MB)")
    if push:
        push.upload(output)


def from_export(directory: Path, source: Path, output: Path, made: ExportInfo) -> None:
    """Convert an export to another dtype, with a new card. Raises as `copy_as`."""
    partial_output = output.with_name(f"{output.name}.partial")
    try:
        with storage_errors(output):
            rounding = copy_as(source, partial_output, getattr(torch, made.dtype), directory).text(
                PRECISIONS[made.dtype]
            )
            write_card(directory, replace(made, rounding=rounding), partial_output)
            put_in_place(partial_output, output)
    finally:
        shutil.rmtree(partial_output, ignore_errors=True)
    print(rounding, end="\n" if rounding else "")


def copy_as(source: Path, target: Path, dtype: torch.dtype, parent: Path | None = None) -> Rounding:
    """Copy a model folder with its weights in another dtype. Returns what that changes.

    Integers and the files of UNCHANGED stay as they are.

    Raises:
        NumericError: a value is out of the dtype's range.
        CheckpointError: a link leads out of the folder, or `source` itself out of `parent`.
        ConfigurationError: weights are missing or damaged.
    """
    check_links(source, parent)
    adapter = source / "adapter_model.safetensors"
    if (source / "adapter_config.json").exists():
        header(adapter)
    else:
        weight_files(str(source))
    shutil.rmtree(target, ignore_errors=True)  # of a conversion that was killed
    target.mkdir(parents=True)
    rounding = Rounding()
    for path in source.iterdir():
        _copy(path, target / path.name, dtype, rounding)
    return rounding


def _copy(source: Path, target: Path, dtype: torch.dtype, rounding: Rounding) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.name.startswith(UNCHANGED):
        shutil.copyfile(source, target)
    elif source.suffix == ".safetensors":
        stored = header(source)
        tensors = read(stored, stored)
        cast = {name: one for name, one in tensors.items() if one.is_floating_point()}
        problems = [str(problem) for name, tensor in cast.items() if (problem := out_of_range(name, tensor, dtype))]
        if problems:
            raise NumericError("\n".join([f"{source}: not exported", *(f"  {problem}" for problem in problems)]))
        for name, tensor in cast.items():
            tensors[name] = tensor.to(dtype)
            rounding.add(tensor, tensors[name])
        save_file(tensors, target, metadata=METADATA)
    elif source.name == "config.json":
        stored = read_record(source, dict)
        fields = stored.require(CheckpointError, "export the model again from a checkpoint (--checkpoint)")
        fields["dtype"] = dtype_name(dtype)
        if isinstance(inner := fields.get("text_config"), dict) and "dtype" in inner:
            fields["text_config"] = {**inner, "dtype": dtype_name(dtype)}
        write_json(target, fields)
    elif source.name.endswith(".safetensors.index.json"):
        files = indexed_files(source)
        sizes = (
            stored.stop - stored.start if file.name.startswith(UNCHANGED) else math.prod(stored.shape) * dtype.itemsize
            for file in set(files.values())
            for stored in header(file).values()
        )
        names = {name: file.name for name, file in files.items()}
        write_json(target, {"metadata": {"total_size": sum(sizes)}, "weight_map": names})
    else:
        shutil.copyfile(source, target)


class OpenedCheckpoint(NamedTuple):
    """A checkpoint that fits its recipe: the task, the model on the meta device, and the reader of its tensors."""

    task: Task
    skeleton: PreTrainedModel
    reader: CheckpointReader

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, fp32 tensor) of each trained parameter, read from the ranks' files one by one."""
        for name, shape in trained_shapes(self.skeleton).items():
            yield name, self.reader.read(name, "weight", Region(0, shape.numel())).view(shape)


def open_checkpoint(folder: Path, recipe: Recipe) -> OpenedCheckpoint:
    """Open a checkpoint as the training would do, whose recipe's data give the tokenizer and the names of classes.

    Raises:
        CheckpointError: if model or data differ from those of the checkpoint.
        DataError: if the recipe's data cannot be loaded.
    """
    saved = read_state(folder)
    try:
        task = registry.load_task(recipe)
    except DataError as error:
        raise DataError(
            f"{folder}: the checkpoint's data, which its tokenizer needs, cannot be read: {error}"
        ) from error
    skeleton = skeleton_of(recipe, task)
    now = json_values(identity(skeleton.config, task))
    # A tokenizer that was trained on the rows needs the same rows; any other may meet new ones.
    if recipe.tokenizer.vocabulary_size is None:
        now["data"]["rows"] = saved["data"]["rows"]
    changes = refusals(saved, {**saved, **now})
    if changes:
        listed = "\n".join(f"  {text}" for text in changes)
        raise CheckpointError(
            f"{folder}: the model or data differ from the checkpoint's; restore the same ones\n{listed}"
        )
    reader, trained = CheckpointReader(folder), trained_shapes(skeleton)
    # what an optimizer or a momentum encoder keeps in shapes of its own, which an export does not read
    others = {
        name: shape for name, shape in reader.shapes.items() if name == QUEUE or name.rpartition(".")[0] in trained
    }
    reader.check_names(trained | others)
    return OpenedCheckpoint(task, skeleton, reader)


def from_checkpoint(directory: Path, folder: Path, recipe: Recipe, output: Path, made: ExportInfo) -> None:
    """Export a checkpoint as the training would have done. Raises as `open_checkpoint`."""
    opened, rounding = open_checkpoint(folder, recipe), Rounding()
    task, skeleton, dtype = opened.task, opened.skeleton, getattr(torch, made.dtype)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in opened.weights():
            rounding.add(tensor, tensor.to(dtype))
            yield name, tensor

    def card(target: Path) -> None:
        write_card(directory, replace(made, rounding=rounding.text(PRECISIONS[made.dtype])), target)

    lacks = export(
        chain(weights(), constant_tensors(skeleton, recipe), frozen_tensors(skeleton, recipe)),
        skeleton,
        ExportTarget(
            output,
            task.tokenizer,
            dtype=dtype,
            kept=partial(kept_tensors, skeleton, recipe),
            card=card,
            save_task_files=task.save_task_files,
        ),
        True,  # the only process
    )
    print("".join(f"{text}\n" for text in (lacks, rounding.text(PRECISIONS[made.dtype])) if text), end="")
