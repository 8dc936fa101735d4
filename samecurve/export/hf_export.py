"""Writes the trained model as a Hugging Face folder, or its adapter in peft's format, one parameter at a time."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from samecurve.errors import CheckpointError, ConfigurationError, NumericError, SamecurveError, StorageError
from samecurve.export.config_files import save_tokenizer, settle_config, write_generation_config
from samecurve.export.model_card import ADAPTED_CONFIG
from samecurve.export.weight_shards import METADATA, SHARD_BYTES, UNCHANGED, Shard, name_shards, write_kept
from samecurve.interfaces.engine import dtype_name
from samecurve.models import dequantize
from samecurve.models.hf_config import is_remote, kind_of
from samecurve.models.lora import is_adapted, stored_config, stored_names, stored_twice
from samecurve.models.packaged import PROCESSOR_FILES, Package, package_of
from samecurve.models.pretrained import Pretrained, constants
from samecurve.models.weight_conversion import Storage
from samecurve.models.weight_files import Stored
from samecurve.specs.heads import CAUSAL
from samecurve.storage.atomic import storage_errors, write_json
from samecurve.storage.checksums import write_checksums
from samecurve.storage.fault_points import fault_point
from samecurve.storage.filesystem import is_own_file
from samecurve.storage.records import read_record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ExportTarget:
    """The folder to write, and what is written into it beside the weights.

    Attributes:
        path: the folder, which must not exist.
        tokenizer: the model's tokenizer.
        shard_bytes: largest size of a weight file.
        dtype: dtype of the weights in the files.
        kept: finds the stored tensors to copy, by name; see weights.kept_tensors. None: those of a packaged model
            beside its text part.
        card, save_task_files: write the model card and the task's own files into the folder.
        check: called with the complete folder before it gets its name; it may move the folder away and raise.
        busy: called repeatedly while files are flushed to the disk.
    """

    path: Path
    tokenizer: PreTrainedTokenizerBase
    shard_bytes: int = SHARD_BYTES
    dtype: torch.dtype = torch.float32
    kept: Callable[[], Mapping[str, Stored]] | None = None
    card: Callable[[Path], None] = lambda directory: None
    save_task_files: Callable[[Path, PreTrainedConfig], None] = lambda directory, config: None
    check: Callable[[Path], None] = lambda directory: None
    busy: Callable[[], None] = lambda: None


def export(
    parameters: Iterator[tuple[str, Tensor | None]], skeleton: PreTrainedModel, target: ExportTarget, is_main: bool
) -> str:
    """Write safetensors, config and tokenizer to a folder, atomically; of an adapted model only peft's adapter.

    The text part of a packaged model is written with the rest of that model, copied from the start model's files.
    Where those are gone, the text part is written alone, and a sentence about that is returned; else "".

    Args:
        parameters: the engine's, and then weights.constant_tensors and frozen_tensors. Gathering one is collective,
            so every rank iterates to the end, and problems are reported after the last one.
        skeleton: the model on the meta device. Each of its parameters and constants is expected once, with its name
            and shape.
        target: the folder.
        is_main: whether this is rank 0, which writes, holds one weight file in memory at most, and raises the errors.

    Raises NumericError for values that are not finite, CheckpointError for a missing, unknown or misshapen tensor,
    StorageError if the folder cannot be written or already exists, and what `target.check` raises.
    """
    if not is_main:
        for _ in parameters:
            pass
        return ""
    kept, lost = _kept(skeleton, target)
    folder = target.path.with_name(f"{target.path.name}.partial")
    layout = _layout_of(skeleton, target.shard_bytes, kept)
    writer = _FileWriter(skeleton, layout, folder, target.dtype)
    shutil.rmtree(folder, ignore_errors=True)  # of a killed export: transformers would read its files, too
    try:
        for name, tensor in parameters:
            writer.take(name, tensor)
        writer.finish(kept or {})
        with storage_errors(folder):
            layout.write_config(skeleton, folder, target)
            save_tokenizer(target.tokenizer, folder)
            target.card(folder)
            target.save_task_files(folder, skeleton.config)
            target.check(folder)
            put_in_place(folder, target.path, target.busy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return lost


def _kept(skeleton: PreTrainedModel, target: ExportTarget) -> tuple[Mapping[str, Stored] | None, str]:
    """Return the stored tensors to copy, or None and a sentence where they cannot be read any more."""
    package = package_of(skeleton)
    if is_adapted(skeleton):
        return {}, ""
    try:
        if target.kept is not None:
            return target.kept(), ""
        return Pretrained(skeleton, skeleton, package.path, package.revision).kept() if package else {}, ""
    except ConfigurationError as error:
        without = " without the tensors that its class does not have"
        if package:
            without = f", the text part of the {package.model.config.model_type} alone"
        return None, (
            f"the export is a {type(skeleton).__name__}{without}, because the rest of the start model cannot be read: "
            f"{error}. With model.path back in place, python -m samecurve export RUN --checkpoint latest makes the "
            "whole model, if the run has kept a checkpoint"
        )


class _FileLayout(NamedTuple):
    """Layout of the files.

    Attributes:
        groups: for each parameter, the parameters that are converted together with it.
        convert: maps a group's parameters to the stored tensors, by name.
        stem: file name without suffix.
        shard_bytes: largest size of a file, in bytes.
        write_config: writes the configs, called with (skeleton, directory, target).
    """

    groups: dict[str, tuple[str, ...]]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    stem: str
    shard_bytes: float
    write_config: Callable[[PreTrainedModel, Path, ExportTarget], None]


def _layout_of(skeleton: PreTrainedModel, shard_bytes: int, kept: Mapping[str, Stored] | None) -> _FileLayout:
    """Return the layout of an adapter, of a model, or of the packaged one around it.

    `kept` are the tensors beside the text part.
    """
    if is_adapted(skeleton):
        stored, twice = stored_names(skeleton), stored_twice(skeleton)

        def convert_adapter(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            second = {twice[name]: tensor.clone() for name, tensor in tensors.items() if name in twice}
            return {stored[name]: tensor for name, tensor in tensors.items()} | second

        # a single file, because peft reads only one
        groups = {name: (name,) for name in stored}
        return _FileLayout(groups, convert_adapter, "adapter_model", math.inf, _write_adapter_config)
    package, names = package_of(skeleton), [*(name for name, _ in skeleton.named_parameters())]
    names += sorted(constants(skeleton).difference(names))
    if package is None or kept is None:
        storage = Storage(skeleton)
        return _FileLayout(
            storage.groups(names), storage.convert, "model", shard_bytes, partial(_write_config, kept=kept or ())
        )
    storage, published = Storage(package.model), {name: package.name(name) for name in names}
    own = {published[name]: name for name in names}
    groups = {own[name]: tuple(own[member] for member in group) for name, group in storage.groups([*own]).items()}

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return storage.convert({published[name]: tensor for name, tensor in tensors.items()})

    folders = {stored.file.parent for stored in kept.values()}
    return _FileLayout(groups, convert, "model", shard_bytes, partial(_write_package, package, folders))


def _write_package(
    package: Package, folders: set[Path], skeleton: PreTrainedModel, directory: Path, target: ExportTarget
) -> None:
    """Write the configs of a packaged model, and its processor's files from the start model's folder."""
    write_json(directory / "config.json", package.config_fields(dtype_name(target.dtype)))
    if skeleton.generation_config is not None:
        write_generation_config(skeleton.generation_config, target.tokenizer, directory)
    for file in (folder / name for folder in folders for name in PROCESSOR_FILES):
        if is_own_file(file):
            shutil.copyfile(file, directory / file.name)


class _FileWriter:
    """Collects parameters into files. After the first problem nothing more is written, and `finish` raises."""

    def __init__(self, skeleton: PreTrainedModel, layout: _FileLayout, directory: Path, dtype: torch.dtype):
        tensors = {**dict(skeleton.named_parameters()), **dict(skeleton.named_buffers())}
        self._constants = constants(skeleton)
        self._expected = {name: tensors[name] for name in layout.groups}
        self._layout, self._directory, self._limit, self._dtype = layout, directory, layout.shard_bytes, dtype
        self._waiting: dict[str, Tensor] = {}  # parameters whose group is not complete
        self._shard: dict[str, Tensor] = {}
        self._unchanged: dict[str, Tensor] = {}
        self._shard_size = 0
        self._shards: list[Shard] = []
        self._seen: set[str] = set()
        self._problems: list[SamecurveError] = []

    def take(self, name: str, tensor: Tensor | None) -> None:
        problem = self._check(name, tensor)
        self._seen.add(name)
        if problem is not None:
            self._problems.append(problem)
        if self._problems:
            self._shard.clear()
            self._waiting.clear()
            return
        assert tensor is not None  # which `_check` reports
        dtype = tensor.dtype if name in self._constants else self._dtype
        self._waiting[name] = tensor.detach().to("cpu", dtype)
        group = self._layout.groups[name]
        if self._waiting.keys() >= set(group):
            members = {member: self._waiting.pop(member) for member in group}
            for stored, converted in self._layout.convert(members).items():
                tensor = converted.contiguous()
                if name in self._constants:
                    self._unchanged[stored] = tensor.clone()
                    continue
                if self._shard and self._shard_size + tensor.nbytes > self._limit:
                    self._flush()
                # Clone a view, which would be saved with all of its storage, or refused as shared.
                self._shard[stored] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
                self._shard_size += tensor.nbytes

    def finish(self, kept: Mapping[str, Stored]) -> None:
        """Write the last files, copies of `kept` among them, and the index.

        Raises the first problem's class with all problems in its message.
        """
        missing = self._expected.keys() - self._seen
        if missing:
            self._problems.append(CheckpointError(f"missing parameters: {', '.join(sorted(missing))}"))
        if not self._problems:
            self._flush()
        if not self._problems:
            try:
                if self._unchanged:
                    path = self._directory / "constants.safetensors"
                    with storage_errors(self._directory):
                        save_file(self._unchanged, path, metadata=METADATA)
                    self._shards.append(Shard(path, UNCHANGED, list(self._unchanged)))
                name_shards([*self._shards, *write_kept(self._directory, kept)])
            except (CheckpointError, StorageError) as error:
                self._problems.append(error)
        if self._problems:
            listed = "\n".join(f"  {problem}" for problem in self._problems)
            raise type(self._problems[0])(f"the model was not exported to {self._directory.stem}/:\n{listed}")

    def _check(self, name: str, tensor: Tensor | None) -> SamecurveError | None:
        if name not in self._expected:
            return CheckpointError(f"{name}: the model has no such parameter")
        if name in self._seen:
            return CheckpointError(f"{name}: given twice")
        if tensor is None or tensor.numel() == 0:
            return CheckpointError(f"{name}: empty")
        shape = self._expected[name].shape
        if tensor.shape != shape:
            return CheckpointError(f"{name}: found shape {tuple(tensor.shape)}, but the model has {tuple(shape)}")
        if not torch.isfinite(tensor).all():
            return NumericError(f"{name}: {int((~torch.isfinite(tensor)).sum())} values are not finite")
        return None if name in self._constants else out_of_range(name, tensor, self._dtype)

    def _flush(self) -> None:
        """Write the collected parameters to a file."""
        # An error is stored and raised later: this rank must still take part in gathering the other parameters.
        try:
            with storage_errors(self._directory, self._shard_size):
                fault_point("export.write")
                self._directory.mkdir(parents=True, exist_ok=True)
                path = self._directory / f"shard-{len(self._shards)}.safetensors"
                save_file(self._shard, path, metadata=METADATA)
            self._shards.append(Shard(path, self._layout.stem, list(self._shard)))
        except StorageError as error:
            self._problems.append(error)
        self._shard = {}
        self._shard_size = 0


def out_of_range(name: str, tensor: Tensor, dtype: torch.dtype) -> NumericError | None:
    """Return an error if finite values would become infinite in `dtype` (fp16 ends at 65504); else None."""
    lost = int((~torch.isfinite(tensor.detach().to(dtype))).sum())
    if not lost:
        return None
    largest = tensor.detach().abs().max().item()
    return NumericError(
        f"{name}: {lost} values exceed the range of {dtype_name(dtype)} (up to {largest:g}); choose bf16"
    )


def _write_adapter_config(skeleton: PreTrainedModel, directory: Path, target: ExportTarget) -> None:
    """Write peft's config, and the model's own config if its head may differ from the base model's."""
    adapter = stored_config(skeleton)
    adapter.save_pretrained(str(directory))
    # The model's config has the names of classes and the padding token. It gets a folder of its own, because
    # transformers takes a folder with config.json for a whole model.
    if kind_of(skeleton) != CAUSAL.kind:
        _write_config(skeleton, directory / ADAPTED_CONFIG, target)
        # loaded with the base model's weights, and so needed where those are quantized
        if settings := dequantize.stored_settings(skeleton.config._name_or_path, adapter.revision):
            file = directory / ADAPTED_CONFIG / "config.json"
            written = read_record(file).require(CheckpointError, "export again")
            write_json(file, {**written, "quantization_config": settings})
    elif skeleton.generation_config is not None:
        write_generation_config(skeleton.generation_config, target.tokenizer, directory)


def _write_config(skeleton: PreTrainedModel, directory: Path, target: ExportTarget, kept: Iterable[str] = ()) -> None:
    config = copy.deepcopy(skeleton.config)
    config.architectures = [type(skeleton).__name__]
    config.dtype = dtype_name(target.dtype)
    config.use_cache = True  # training turns it off, but generation with the export needs it
    settle_config(skeleton, config, target.tokenizer, kept)
    if skeleton.can_generate() and skeleton.generation_config is not None:
        write_generation_config(skeleton.generation_config, target.tokenizer, directory)
    if is_remote(config):
        # transformers annotates `config` as a dict, but passes its own configs.
        custom_object_save(skeleton, directory, config=config)  # pyright: ignore[reportArgumentType]  # see above
    config.save_pretrained(directory)


def put_in_place(partial: Path, directory: Path, busy: Callable[[], None] = lambda: None) -> None:
    """Add SHA256SUMS, flush all files and rename the folder. Raises StorageError if `directory` already exists."""
    if directory.exists():
        raise StorageError(f"{directory}: exists already; the model was not exported")
    write_checksums(partial, busy)
    for file in (path for path in partial.rglob("*") if path.is_file()):
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
        busy()
    os.rename(partial, directory)
