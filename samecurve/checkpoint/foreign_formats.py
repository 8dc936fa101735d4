"""Checkpoints of transformers.Trainer, Accelerate, DeepSpeed ZeRO and torch's distributed checkpoint (DCP), read whole.

    checkpoint-40/     trainer_state.json, model.safetensors, optimizer.pt         transformers.Trainer
    checkpoint_4/      model.safetensors, optimizer.bin                            Accelerator.save_state
    checkpoint_4/      pytorch_model_fsdp_0/, optimizer_0/ (two of DCP's folders)  Accelerator.save_state, FSDP
    checkpoint_4/      pytorch_model/ (DeepSpeed's folder)                         Accelerator.save_state, DeepSpeed
    global_step40/     *_model_states.pt, *_optim_states.pt                        DeepSpeed; `latest` names the folder
    step-40/           .metadata, __0_0.distcp                                     torch.distributed.checkpoint

No code of a checkpoint runs. Its pickles are read by torch's `weights_only`, and DCP's .metadata by an unpickler that
knows the classes of that file alone. What they do not know is refused with its name.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from samecurve.checkpoint.foreign import (
    ForeignCheckpoint,
    Names,
    check_shapes,
    keys_of,
    load_pickle,
    take_optimizer,
    take_states,
)
from samecurve.errors import CheckpointError, ConfigurationError
from samecurve.models.pretrained import Pretrained
from samecurve.models.weight_files import header, read, weight_files
from samecurve.storage.records import COUNT, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRAINER_STATE = "trainer_state.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model.bin")
_FSDP_WEIGHTS = "pytorch_model_fsdp"
# the plain values that are read of an optimizer's groups
_SETTINGS = ("params", "lr", "betas", "eps", "weight_decay")


def locate(path: Path) -> tuple[str, Path]:
    """Find the newest checkpoint in a folder, or in its `checkpoints/`, or the folder itself.

    Returns:
        (name of the format, folder).

    Raises:
        ConfigurationError: there is none that is known, or several whose numbers count different things.
    """
    if name := _format_of(path):
        return name, path
    folders = [folder for parent in (path, path / "checkpoints") if parent.is_dir() for folder in parent.iterdir()]
    numbered = [
        (int(match[2]), match[1], name, folder)
        for folder in folders
        if (match := re.fullmatch(r"(.*?)(\d+)", folder.name)) and (name := _format_of(folder))
    ]
    if len(kinds := sorted({kind for _, kind, *_ in numbered})) > 1:
        raise ConfigurationError(f"{path}: the numbers of {', '.join(kinds)} cannot be compared; give one checkpoint")
    if numbered:
        *_, name, folder = max(numbered)
        return name, folder
    raise ConfigurationError(
        f"{path}: no checkpoint of transformers.Trainer, Accelerate (save_state), DeepSpeed or torch's distributed "
        "checkpoint is here; give its folder, or the one with checkpoint-10, checkpoint-20, ...; to begin a run from "
        "the weights of a model alone, set model.path"
    )


def _format_of(folder: Path) -> str:
    """Name the format of a checkpoint by its files; "" for a folder that is none."""
    if (folder / _TRAINER_STATE).is_file():
        return "transformers.Trainer"
    if (folder / "latest").is_file() or any(folder.glob("*_model_states.pt")):
        return "DeepSpeed"
    if (folder / f"{_FSDP_WEIGHTS}_0").is_dir() or (folder / f"{_FSDP_WEIGHTS}.bin").is_file():
        return "Accelerate"
    if (folder / ".metadata").is_file():
        return "torch.distributed.checkpoint"
    has_weights = any((folder / name).is_file() for name in _WEIGHTS)
    return "Accelerate" if has_weights and any(folder.glob("random_states_*.pkl")) else ""


def read_foreign(path: Path, names: Names, model: PreTrainedModel) -> ForeignCheckpoint:
    """Read the newest checkpoint below `path`, with the values on the CPU.

    Args:
        model: skeleton on the meta device, whose rules convert stored weights to parameters.

    Raises:
        ConfigurationError: there is no checkpoint.
        CheckpointError: it cannot be read without running code, or does not fit the model; lists every problem.
    """
    checkpoint = ForeignCheckpoint(*locate(path))
    folder = checkpoint.folder
    try:
        if (
            (folder / "pytorch_model").is_dir()
            or (folder / "latest").is_file()
            or any(folder.glob("*_model_states.pt"))
        ):
            _read_zero(checkpoint, names)
        elif (folder / f"{_FSDP_WEIGHTS}_0").is_dir():
            _read_dcp(checkpoint, names, folder / f"{_FSDP_WEIGHTS}_0", folder / "optimizer_0")
        elif (folder / ".metadata").is_file():
            _read_dcp(checkpoint, names, folder, folder)
        else:
            _read_files(checkpoint, names, model)
    except (KeyError, TypeError, IndexError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: not as {checkpoint.format} writes it ({type(error).__name__}: {str(error):.200})"
        ) from error
    checkpoint.step = max(checkpoint.step, checkpoint.updates)
    state = folder / _TRAINER_STATE
    if state.is_file():
        content = read_record(state, {"global_step": COUNT}).require(CheckpointError, "use another checkpoint")
        checkpoint.step = content["global_step"]
    check_shapes(checkpoint, names)
    if not checkpoint.moments:
        checkpoint.missing.append("no moments of AdamW: the optimizer and the schedule of its learning rate begin anew")
    return checkpoint


# --- files of whole tensors: transformers.Trainer, Accelerate in one process or under DDP


def _read_files(checkpoint: ForeignCheckpoint, names: Names, model: PreTrainedModel) -> None:
    folder = checkpoint.folder
    adapter = folder / "adapter_model.safetensors"
    pickled = [path for name in ("pytorch_model.bin", f"{_FSDP_WEIGHTS}.bin") if (path := folder / name).is_file()]
    try:
        if pickled and not any(folder.glob("*.safetensors")):
            tensors = load_pickle(pickled[0])
            checkpoint.weights = {name: tensors[key] for name, key in keys_of(folder, tensors, names).items()}
        elif checkpoint.format == "transformers.Trainer" and not adapter.is_file():
            # save_pretrained stores some families in another layout than the model's
            pretrained = Pretrained(model, model, str(folder))
            pretrained.check({*names.shapes}, set())
            checkpoint.weights = dict(pretrained.tensors({*names.shapes}, set()))
        else:
            stored = header(adapter) if adapter.is_file() else weight_files(str(folder))
            keys = keys_of(folder, stored, names)
            tensors = read(stored, keys.values())
            checkpoint.weights = {name: tensors[key] for name, key in keys.items()}
    except ConfigurationError as error:
        raise CheckpointError(f"{folder}: its weights cannot be used: {error}") from error
    for path in (folder / "optimizer.pt", folder / "optimizer.bin"):
        if path.is_file():
            take_optimizer(checkpoint, names, load_pickle(path))


# --- torch.distributed.checkpoint


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of the classes in a .metadata file of DCP, and of nothing else."""

    _CLASSES = {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    } | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
        *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in self._CLASSES and not is_dtype:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            with path.open("rb") as file:
                content = _MetadataUnpickler(file).load()
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path}: refused, as reading it would run code ({error})") from error
        except (OSError, EOFError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        if not isinstance(content, metadata.Metadata):
            raise CheckpointError(f"{path}: cannot be read (it holds no Metadata)")
        content.storage_meta = content.storage_meta or metadata.StorageMeta()
        content.storage_meta.load_id = self.load_id
        return content


class _Planner(DefaultLoadPlanner):
    """The default planner, whose plain values are read by weights_only."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = load_pickle(value)


def _read_dcp(checkpoint: ForeignCheckpoint, names: Names, weights: Path, optimizer: Path) -> None:
    """Read DCP's folders of the weights and of the optimizer, which may be the same."""
    stored = _Reader(weights).read_metadata().state_dict_metadata
    keys = keys_of(weights, stored, names)
    tensors = _load(weights, stored, [*keys.values()])
    checkpoint.weights = {name: tensors[key] for name, key in keys.items()}
    if not (optimizer / ".metadata").is_file():
        return
    stored = _Reader(optimizer).read_metadata().state_dict_metadata
    wanted = {}  # (part, parameter or group, kind) by key
    for key in stored:
        match = re.match(r"(?:.*optim\w*\.)?(state|param_groups)\.(.+)\.(\w+)$", key)
        if match and (match[1] == "state" or match[3] in _SETTINGS):
            wanted[key] = match.groups()
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in _load(optimizer, stored, [*wanted]).items():
        part, owner, kind = wanted[key]
        parts[part].setdefault(owner, {})[kind] = value
    states: dict = parts["state"]
    if all(owner.isdigit() for owner in states):
        states = {int(owner): state for owner, state in states.items()}
    take_optimizer(checkpoint, names, {"state": states, "param_groups": [*parts["param_groups"].values()]})


def _load(folder: Path, stored: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Read tensors, whole, and plain values of a DCP folder by key."""
    values: dict[str, Any] = {}
    for key in keys:
        item = stored[key]
        is_tensor = isinstance(item, metadata.TensorStorageMetadata)
        values[key] = torch.empty(item.size, dtype=item.properties.dtype) if is_tensor else None
    try:
        load(values, storage_reader=_Reader(folder), planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # a BaseException
        failure = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            str(failure) if isinstance(failure, CheckpointError) else f"{folder}: {failure}"
        ) from error
    return values


# --- DeepSpeed


def _read_zero(checkpoint: ForeignCheckpoint, names: Names) -> None:
    """Read the fp32 weights and moments of ZeRO-1, 2 or 3 from the flat groups of all ranks.

    The layout is that of deepspeed/utils/zero_to_fp32.py: under ZeRO-1 and 2 a group's parameters one after the other,
    cut into equal parts; under ZeRO-3 a part of each parameter, padded to the number of ranks.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
    folder = checkpoint.folder
    latest = folder / "latest"
    name = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    if Path(name).name != name:
        raise CheckpointError(f"{latest}: found {name!r:.80}, but it must be the name of a folder beside it")
    folder /= name if name or any(folder.glob("*_model_states.pt")) else "pytorch_model"
    ranks = [load_pickle(path, *classes) for path in _by_rank(folder, "*_optim_states.pt")]
    model = load_pickle(_by_rank(folder, "*_model_states.pt")[0], *classes)
    optimizers = [rank["optimizer_state_dict"] for rank in ranks]
    stage, count = int(optimizers[0]["zero_stage"]), optimizers[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if count != len(ranks):
        raise CheckpointError(f"{folder}: has the states of {len(ranks)} ranks, but {count} wrote it; copy all files")
    split = _split_zero3 if stage == 3 else _split_zero12
    flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    shapes, padding = model["param_shapes"], optimizers[0].get("param_alignment_paddings")
    weights = split([rank[flat] for rank in optimizers], shapes, padding)
    states = [[rank[base]["state"][index] for index in range(len(rank[flat]))] for rank in optimizers]
    kinds = {key for rank in states for state in rank for key in state}
    per_name: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for kind in kinds:
        first, whole = states[0][0][kind], {}
        if isinstance(first, Tensor) and first.dim():  # not the step counter
            whole = split([[state[kind] for state in rank] for rank in states], shapes, padding)
        for name, values in per_name.items():
            values[kind] = whole.get(name, first)
    groups = optimizers[0][base]["param_groups"]
    checkpoint.step = model["global_steps"]
    keys = keys_of(folder, weights, names)
    checkpoint.weights = {name: weights[key] for name, key in keys.items()}
    take_states(checkpoint, {name: per_name[key] for name, key in keys.items()}, groups)


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    paths = sorted(folder.glob(pattern), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    if not paths:
        raise CheckpointError(f"{folder}: no {pattern} here; ZeRO-1, 2 and 3 write one for each rank")
    return paths


_Shapes = list[Mapping[str, torch.Size]]


def _split_zero12(ranks: list[list[Tensor]], shapes: _Shapes, paddings: list | None) -> dict[str, Tensor]:
    tensors = {}
    for index, group in enumerate(shapes):
        flat, offset = torch.cat([rank[index] for rank in ranks]), 0
        for number, (name, shape) in enumerate(group.items()):
            tensors[name] = flat[offset : offset + shape.numel()].view(shape)
            offset += shape.numel() + (paddings[index][number] if paddings else 0)
    return tensors


def _split_zero3(ranks: list[list[Tensor]], shapes: _Shapes, _: list | None) -> dict[str, Tensor]:
    tensors, offset, flats = {}, 0, [torch.cat(rank) for rank in ranks]
    for group in shapes:
        for name, shape in group.items():
            part = math.ceil(shape.numel() / len(ranks))
            whole = torch.cat([flat[offset : offset + part] for flat in flats])
            tensors[name] = whole[: shape.numel()].view(shape)
            offset += part
    return tensors
