"""Weights and optimizer states of what a script has prepared, as checkpoints read and write them.

Nothing says what a script's model is or which part of it the script can make again. So all parameters are saved, frozen
ones too, and all persistent buffers. What an optimizer keeps is read off the live optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from samecurve.accelerator import deepspeed_introspection
from samecurve.accelerator.sharded_state import DTensorShards, Zero3Shards, Zero12Shards, working_partition
from samecurve.checkpoint.format import DTYPES
from samecurve.errors import CheckpointError
from samecurve.interfaces.region import Region
from samecurve.interfaces.sharded_state import WEIGHT, Kinds, SavedState, ShardRange, Visit

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_EXACT = (torch.float32, torch.bfloat16, torch.float16)  # of which the file's fp32 keeps every value


def describe_states(optimizer: torch.optim.Optimizer, tensor: Tensor, name: str, shape: torch.Size) -> dict:
    """Describe an optimizer's states of a parameter, kept under `tensor`; see PreparedState.record.

    Raises:
        CheckpointError: a state that checkpoints cannot hold.
    """
    kinds, scalars = [], {}
    for key, value in (optimizer.state.get(tensor) or {}).items():
        is_tensor = isinstance(value, Tensor)
        if value is None:
            continue
        if is_tensor and key != "step" and value.shape == tensor.shape and value.dtype in _EXACT:
            kinds.append(key)
        elif isinstance(number := value.item() if is_tensor and value.numel() == 1 else value, (int, float)):
            scalars[key] = [number, str(value.dtype).removeprefix("torch.") if is_tensor else ""]
        else:
            what = f"{value.dtype} {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise CheckpointError(
                f"{type(optimizer).__name__}: the state {key} of {name} is {what}; save_state keeps numbers and "
                f"tensors of the parameter's shape, {tuple(shape)}, which every strategy can divide: take an optimizer "
                "such as AdamW"
            )
    return {"kinds": kinds, "scalars": scalars}


def warn_of_unsaved_states(optimizer: torch.optim.Optimizer, is_main: bool) -> None:
    """Warn after the optimizer's first step, and not at a save hours later, of states that cannot be saved."""
    waiting = True

    def check(*_: Any) -> None:
        nonlocal waiting
        if not waiting:
            return
        waiting = False
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            try:
                describe_states(optimizer, parameter, "a parameter", parameter.shape)
            except CheckpointError as error:
                if is_main:
                    warnings.warn(f"save_state will fail. {error}", stacklevel=3)
                return

    optimizer.register_step_post_hook(check)


class PreparedState:
    """Implementation of interfaces.engine.Saved, and of its State, for an Accelerator's prepared objects.

    Args:
        saved: "states" of the checkpoint that will be read: by parameter its optimizer states, see `record`. None to
            save what there is.
        shard: (rank, number of ranks) that share the work; None: all of the accelerator's.

    Raises:
        CheckpointError: an optimizer keeps what the format cannot hold, or the objects are none that it knows.
    """

    factors: dict[str, tuple[int, ...]] = {}
    codes: Container[tuple[str, str]] = ()

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        saved: dict[str, dict] | None = None,
        shard: tuple[int, int] | None = None,
    ):
        self._accelerator, self._saved = accelerator, saved
        self.state: SavedState = self
        self.device: torch.device = accelerator.device
        self.shard = shard or (accelerator.process_index, accelerator.num_processes)
        self.parameters: dict[str, Any] = {}
        self.buffers: dict[str, Tensor] = {}
        for index, model in enumerate(accelerator._models):
            self._add_tensors(model, f"model_{index}/" if index else "")
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.shapes = {name: getattr(value, "ds_shape", value.shape) for name, value in self.parameters.items()}
        self._optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in accelerator._optimizers]
        # the optimizer and the tensor under which it keeps a parameter's state: the parameter, or a flat group of ZeRO
        self._slots: dict[str, tuple[torch.optim.Optimizer, Tensor]] = {}
        engines = [model for model in accelerator._models if hasattr(model, "zero_optimization_stage")]
        self._engine: Any = engines[0] if engines else None
        zero = getattr(self._engine, "optimizer", None)
        self._is_zero = zero is not None and not isinstance(zero, torch.optim.Optimizer)
        if len(engines) > 1:
            raise CheckpointError("save_state and load_state know one model under DeepSpeed, as prepare does")
        self._find_slots()
        self.states = {name: describe_states(*slot, name, self.shapes[name]) for name, slot in self._slots.items()}
        self.kinds: Kinds = {}
        self._parts = self._build_parts()
        for part in self._parts:
            self.kinds |= part.kinds

    def _add_tensors(self, model: Any, prefix: str) -> None:
        while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
            model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        if hasattr(model, "zero_optimization_stage"):
            model = model.module
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise CheckpointError("fsdp_version: found 1, whose shards have no names; set fsdp_version: 2")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass the root has its weights gathered, in parameters of their own
        for name, parameter in model.named_parameters():
            if parameter.dtype in _EXACT:
                self.parameters[prefix + _canonical(name)] = parameter
            elif not (parameter.requires_grad or isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")):
                self.buffers[prefix + _canonical(name)] = parameter  # such as quantized weights
            else:
                raise CheckpointError(
                    f"{name}: found a parameter in {parameter.dtype}, expected float32, bfloat16 or float16, whose "
                    "values a checkpoint keeps exactly; convert it"
                )
        self.buffers |= {prefix + _canonical(name): buffer for name, buffer in _persistent_buffers(model)}

    def _find_slots(self) -> None:
        if self._is_zero:
            deepspeed_introspection.link_masters(self._engine)
            zero = self._engine.optimizer
            if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3
                groups, flats = zero.fp16_groups, zero.fp32_partitioned_groups_flat
            else:
                groups = getattr(zero, "bit16_groups", None) or getattr(zero, "bf16_groups", None)
                if groups is None:
                    raise CheckpointError(
                        f"{type(zero).__name__}: save_state does not know this optimizer of DeepSpeed"
                    )
                flats = [base["params"][0] for base in zero.optimizer.param_groups]
            for group, flat in zip(groups, flats, strict=True):  # flat: this rank's fp32 part of the group
                self._slots |= {self._names[id(weight)]: (zero.optimizer, flat) for weight in group}
            return
        for index, optimizer in enumerate(self._optimizers):
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                name = self._names.setdefault(id(parameter), f"optimizer_{index}/parameter_{number}")
                if name in self._slots:
                    raise CheckpointError(f"{name}: two optimizers train this parameter; give it to one of them")
                self.parameters[name] = parameter  # also one of no prepared model
                self.shapes[name] = parameter.shape
                self._slots[name] = optimizer, parameter

    def record(self) -> dict[str, dict]:
        """Return for each trained parameter "kinds", the names of its optimizer states that have its shape, and
        "scalars", the others, as [value, dtype of the tensor or ""]."""
        return self.states

    @property
    def updates(self) -> int:
        """The largest step count in an optimizer; 0 for one that counts none."""
        return int(max((state["scalars"].get("step", [0])[0] for state in self.states.values()), default=0))

    def _build_parts(self) -> list[SavedState]:
        kinds = {name: tuple(state["kinds"]) for name, state in self.states.items()}
        if self._saved is not None:
            wanted = {name: tuple(self._saved.get(name, {}).get("kinds", ())) for name in self._slots}
            if self._is_zero:  # one state of the whole group: the read ones, and those to be zeroed
                of_group: dict[int, dict[str, None]] = {}
                for name, (_, flat) in self._slots.items():
                    of_group.setdefault(id(flat), {}).update(dict.fromkeys((*kinds[name], *wanted[name])))
                wanted = {name: tuple(of_group[id(flat)]) for name, (_, flat) in self._slots.items()}
            kinds = wanted
        trained = {name: self.parameters[name] for name in self._slots}
        frozen = {name: value for name, value in self.parameters.items() if name not in trained}
        no_states: Kinds = dict.fromkeys(frozen, ())
        if any(hasattr(value, "ds_id") for value in frozen.values()):
            parts: list[Any] = [_FrozenZero3(frozen, self.shard)]
        else:
            # frozen weights have an optimizer without states
            parts = [DTensorShards(frozen, SimpleNamespace(state={}), no_states, self.shard)]  # pyright: ignore
        if self._is_zero and self._engine.zero_optimization_stage() == 3:
            return [Zero3Shards(trained, self._engine.optimizer, kinds, self.shard[0]), *parts]
        if self._is_zero:
            return [Zero12Shards(trained, self._engine.optimizer, kinds, saved=set(trained)), *parts]
        for optimizer in self._optimizers:
            own = {name: value for name, value in trained.items() if self._slots[name][0] is optimizer}
            parts.append(DTensorShards(own, optimizer, {name: kinds[name] for name in own}, self.shard))
        return parts

    def ranges(self) -> list[ShardRange]:
        return [shard for part in self._parts for shard in part.ranges()]

    def visit(self, writing: bool = False) -> Visit:
        if writing and not self._is_zero:
            assert self._saved is not None
            # parameters that have other states in the checkpoint, or none, lose those that they have
            for name, (optimizer, parameter) in self._slots.items():
                saved, live = self._saved.get(name, {"kinds": (), "scalars": {}}), self.states[name]
                if any({*saved[part]} != {*live[part]} for part in ("kinds", "scalars")):
                    optimizer.state.pop(parameter, None)
        for part in self._parts:
            with closing(part.visit(writing)) as visited:
                for shard, kind, tensor in visited:
                    known = (self._saved or {}).get(shard.name, {}).get("kinds", ())
                    if writing and kind != WEIGHT and kind not in known:
                        tensor.zero_()
                    else:
                        yield shard, kind, tensor

    def finish(self, updates: int) -> None:
        for part in self._parts:
            part.finish(updates)
        if self._is_zero:
            return
        assert self._saved is not None
        for name, (optimizer, parameter) in self._slots.items():
            for key, (number, dtype) in self._saved.get(name, {}).get("scalars", {}).items():
                state = optimizer.state[parameter]
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                elif dtype:
                    # torch's fused and capturable kernels read their numbers from the parameter's device
                    near = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
                    device = parameter.device if near else "cpu"
                    state[key] = torch.tensor(number, dtype=getattr(torch, dtype), device=device)
                else:
                    state[key] = number

    @property
    def loss_scale_state(self) -> dict:
        if self._engine is not None:
            return deepspeed_introspection.loss_scale_state(self._engine)
        scaler = self._accelerator.scaler
        if scaler is None or not scaler.is_enabled():
            return {}
        return {"value": scaler.get_scale(), "good_steps": scaler._get_growth_tracker()}

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None:
        if self._engine is not None:
            deepspeed_introspection.set_loss_scale(self._engine, values)
        elif values and (scaler := self._accelerator.scaler) is not None and scaler.is_enabled():
            own = {"scale": values["value"], "_growth_tracker": values["good_steps"]}
            scaler.load_state_dict(scaler.state_dict() | own)


class _FrozenZero3:
    """The weights that ZeRO-3 partitions and does not train. Reading them is not collective, writing them is."""

    def __init__(self, parameters: dict[str, Any], shard: tuple[int, int]):
        self._parameters, self._shard = parameters, shard
        self.kinds: Kinds = dict.fromkeys(parameters, (WEIGHT,))

    def ranges(self) -> list[ShardRange]:
        places = ((name, self._region(weight)) for name, weight in self._parameters.items())
        return [ShardRange(name, region, range(region.numel)) for name, region in places if region.numel]

    def _region(self, weight: Any) -> Region:
        start = min(self._shard[0] * weight.partition_numel(), weight.ds_numel)
        return Region(start, min(weight.partition_numel(), weight.ds_numel - start))

    def visit(self, writing: bool = False) -> Visit:
        import deepspeed

        for name, weight in self._parameters.items():
            region = self._region(weight)
            part = working_partition(weight, region) if region.numel else weight.ds_tensor.new_empty(0)
            if part is None:
                raise CheckpointError(f"{name}: a frozen weight on NVMe cannot be saved; keep it on the GPU or the CPU")
            if region.numel:
                part = part.clone() if writing else part
                yield ShardRange(name, region, range(region.numel)), WEIGHT, part
            if not writing:
                continue
            padded = functional.pad(part, (0, weight.partition_numel() - region.numel)).to(weight.device)
            full = padded.new_empty(padded.numel() * self._shard[1])
            distributed.all_gather_into_tensor(full, padded)
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                if self._shard[0] == 0:
                    weight.data.copy_(full[: weight.ds_numel].view(weight.ds_shape))

    def finish(self, updates: int) -> None:
        pass


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            if buffer.dtype not in DTYPES:
                raise CheckpointError(
                    f"{full}: found a buffer in {buffer.dtype}, which no checkpoint keeps; register it with "
                    "persistent=False and compute it anew, or as real numbers (torch.view_as_real)"
                )
            yield full, buffer


def _canonical(name: str) -> str:
    """The parameter's name without what torch.compile and activation checkpointing insert into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
