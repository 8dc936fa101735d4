"""Write a run's model as a folder to share: in the dtype asked for, with a card (README.md) that says how it was made.

It is the run's own export, or that of a checkpoint where the run did not end; no strategy is launched for that. An
adapter stays an adapter; `merge` makes one model of it and its base.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.errors import CheckpointError, ConfigurationError, DataError, NumericError, StorageError
from samecurve.inference import loading
from samecurve.storage.atomic import json_values, storage_errors, write_json

if TYPE_CHECKING:
    import torch

    from samecurve.export.model_card import Made

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "a run directory, for example runs/sft, or a model in one: runs/sft/merged"
    parser.add_argument("run", metavar="RUN", type=Path, help=where)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the stored weights; training's are fp32")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="of this run, instead of RUN/model; latest: the newest")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: RUN/model-DTYPE")
    parser.add_argument("--license", metavar="TEXT", help="for the card, for example apache-2.0; it is yours to know")


def run(arguments: argparse.Namespace) -> int:
    directory = loading.run_directory(arguments.run)
    if directory is None:
        raise ConfigurationError(f"{arguments.run} holds no run (run.json), so nothing is known to write a card of")
    chosen = _chosen(arguments.run, directory, arguments.checkpoint)
    checkpoint = None if chosen else _checkpoint(directory, arguments.checkpoint)
    origin = f"model-{checkpoint.name}" if checkpoint else (chosen or directory / "model").name
    output = arguments.output or directory / f"{origin}-{arguments.dtype}"
    if output.exists():
        raise StorageError(f"{output} is there already; name another folder with --output")
    import torch

    dtype = getattr(torch, DTYPES[arguments.dtype])
    if checkpoint:
        made = _made(arguments, _step(checkpoint))
        from_checkpoint(directory, checkpoint, output, dtype, made)
    else:
        source = chosen or loading.model_folder(directory)
        merged = _is_adapter(directory / "model") and not _is_adapter(source)
        from_export(directory, source, output, dtype, replace(_made(arguments), merged=merged))
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{checkpoint or source} in {arguments.dtype}: {output} ({size / 1e6:,.1f} MB)")
    return 0


def _chosen(given: Path, directory: Path, checkpoint: str | None) -> Path | None:
    """The folder that was named, where it is not the run itself but a model in it."""
    if given.resolve() == directory.resolve():
        return None
    if checkpoint is not None:
        raise ConfigurationError(f"--checkpoint: is of a run, and {given} is a folder of it; give {directory} instead")
    return loading.model_folder(given)


def _is_adapter(folder: Path) -> bool:
    return (folder / loading.ADAPTER_CONFIG).is_file()


def _made(arguments: argparse.Namespace, step: int | None = None) -> Made:
    from samecurve.export.model_card import Made

    return Made(DTYPES[arguments.dtype], arguments.license, step)


def _checkpoint(directory: Path, given: str | None) -> Path | None:
    """The folder of a checkpoint, every byte of it checked; None for the run's own export.

    Raises CheckpointError for a damaged one, ConfigurationError where there is none.
    """
    if given is None and (directory / "model").is_dir():
        return None
    from samecurve.checkpoint.manifest import check_files, list_checkpoints
    from samecurve.storage.filesystem import LocalFileSystem

    files = LocalFileSystem()
    newest = given in (None, "latest")
    folders = list_checkpoints(files, directory / "checkpoints") if newest else [Path(given)]
    if not folders or not folders[0].is_dir():
        what = f"{directory} holds no checkpoint" if newest else f"{given}: no such folder"
        what += "" if given else " and no model/ yet"
        raise ConfigurationError(f"{what}; give the output_dir of a run that got to its first checkpoint")
    rejected = []
    for folder in folders:
        problems = check_files(files, folder)
        if not problems:
            return folder
        rejected += [f"  {folder.name}/{problem}" for problem in problems]
        print("\n".join([f"{folder} is damaged and not used:", *(f"  {problem}" for problem in problems)]))
    raise CheckpointError("\n".join([f"{folders[0].parent}: no checkpoint can be used", *rejected]))


def _step(checkpoint: Path) -> int:
    from samecurve.checkpoint.resume import read_state

    return read_state(checkpoint)["step"]


def from_export(directory: Path, source: Path, output: Path, dtype: torch.dtype, made: Made) -> None:
    """A copy of an export, its weights in another dtype. Raises NumericError for values that do not fit into it."""
    from samecurve.export.hf_export import put_in_place
    from samecurve.export.model_card import write_card

    partial_output = output.with_name(f"{output.name}.partial")
    try:
        with storage_errors(output):
            copy_as(source, partial_output, dtype)
            write_card(directory, made, partial_output)
            put_in_place(partial_output, output)
    finally:
        shutil.rmtree(partial_output, ignore_errors=True)


def copy_as(source: Path, target: Path, dtype: torch.dtype) -> None:
    """A model's folder with its weights in another dtype. Raises NumericError for values that do not fit into it."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        _copy(path, target / path.name, dtype)


def _copy(source: Path, target: Path, dtype: torch.dtype) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.suffix == ".safetensors":
        _cast(source, target, dtype)
    elif source.name == "config.json":
        content = json.loads(source.read_text(encoding="utf-8"))
        write_json(target, {**content, "dtype": str(dtype).removeprefix("torch.")})
    elif source.name.endswith(".safetensors.index.json"):
        content = json.loads(source.read_text(encoding="utf-8"))
        stored = json.loads(source.with_name("config.json").read_text(encoding="utf-8")).get("dtype") or "float32"
        size = content["metadata"]["total_size"] // _itemsize(stored) * dtype.itemsize
        write_json(target, {**content, "metadata": {**content["metadata"], "total_size": size}})
    else:
        shutil.copyfile(source, target)


def _itemsize(dtype: str) -> int:
    import torch

    return getattr(torch, dtype).itemsize


def _cast(source: Path, target: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    from samecurve.export.hf_export import out_of_range

    tensors = load_file(source)
    problems = [str(found) for name, tensor in tensors.items() if (found := out_of_range(name, tensor, dtype))]
    if problems:
        raise NumericError("\n".join([f"{source}: not exported", *(f"  {problem}" for problem in problems)]))
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, target, metadata={"format": "pt"})


def from_checkpoint(directory: Path, folder: Path, output: Path, dtype: torch.dtype, made: Made) -> None:
    """A checkpoint's weights, read name by name from the ranks' files, as the training would have exported them.

    Tokenizer and names of classes come from the data that the recipe names. Raises CheckpointError when those or the
    model are not what they were.
    """
    from samecurve.checkpoint.format import CheckpointReader
    from samecurve.checkpoint.resume import read_state
    from samecurve.export.hf_export import export
    from samecurve.export.model_card import write_card
    from samecurve.interfaces.fingerprint import identity
    from samecurve.models import weights as model
    from samecurve.models.lora import trained_shapes
    from samecurve.tasks import registry

    saved = read_state(folder)
    recipe = loading.recipe_of(saved, folder / "state.json")
    try:
        task = registry.load(recipe)
    except DataError as error:
        raise DataError(f"the tokenizer of a checkpoint comes from its recipe and data: {error}") from error
    skeleton = model.skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    now = json_values(identity(skeleton.config, task))
    if recipe.tokenizer.vocabulary_size is None:  # then nothing of the model was made from the rows
        now["data"]["rows"] = saved["data"]["rows"]
    _check_unchanged(folder, saved, now)
    reader, shapes = CheckpointReader(folder), trained_shapes(skeleton)
    reader.check_names(shapes)
    weights = ((name, reader.read(name, "weight", 0, shape.numel()).view(shape)) for name, shape in shapes.items())
    card = partial(write_card, directory, made)
    beside = task.write_beside
    export(weights, skeleton, task.tokenizer, output, True, dtype=dtype, card=card, write_beside=beside)


def _check_unchanged(folder: Path, saved: dict, now: dict) -> None:
    from samecurve.checkpoint.compatibility import refusals

    found = refusals(saved, {**saved, **now})
    if found:
        listed = "\n".join(f"  {text}" for text in found)
        raise CheckpointError(f"{folder}: its model or data are not what they were, put the same ones back\n{listed}")
