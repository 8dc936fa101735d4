"""Implementations of interfaces.sharded_state.State: weights and optimizer state as regions of flattened tensors.

Under every strategy a rank holds one region of a parameter: all of it (DDP), some rows (FSDP2), a fragment of a flat
group (ZeRO-1 and 2), a partition (ZeRO-3), or some columns. A region of the flattened tensor is therefore the one
layout that all strategies can read and write. Only `finish` communicates or gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from samecurve.accelerator.shard_regions import factor_placed, placed
from samecurve.interfaces.region import Region
from samecurve.interfaces.sharded_state import FACTOR, WEIGHT, Kinds, Master, ShardRange, Visit
from samecurve.optim.dtensor import to_local

DeepSpeedParameter = Any
"""An nn.Parameter with the attributes that DeepSpeed adds, e.g. _hp_mapping, or ds_tensor under ZeRO-3."""


def with_weight(states: Kinds) -> Kinds:
    """Prepend WEIGHT to the names of each parameter's optimizer states, as in `State.kinds`."""
    return {name: (WEIGHT, *names) for name, names in states.items()}


class DTensorShards:
    """State where the optimizer updates the parameters themselves, which may be DTensors.

    That is the case in a single process, under DDP, FSDP2 and HSDP, also with tensor, context or expert parallelism,
    under PyTorch's pipeline schedules, and in DeepSpeed pipelines without flat groups of masters (see Zero12Shards).

    Args:
        parameters: the trained parameters by Hugging Face name.
        states: see optim.factory.state_names.
        replica: (index, count) of this rank among the ranks that hold the same parameters.
        saved: names of the parameters that this rank saves, see Zero12Shards; None: all.
        factors: see optim.factory.factor_shapes.
        reload: lets the next forward pass read weights that a visit has written. Collective.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        states: Kinds,
        replica: tuple[int, int],
        saved: set[str] | None = None,
        factors: Mapping[tuple[str, str], tuple[int, ...]] | None = None,
        reload: Callable[[], None] = lambda: None,
    ):
        self._parameters, self._optimizer, self._replica, self._reload = parameters, optimizer, replica, reload
        self.kinds = with_weight(states)
        self._saved = set(parameters) if saved is None else saved
        factors = factors or {}
        self.factors = {f"{name}.{key}": shape for (name, key), shape in factors.items()}
        self.kinds |= dict.fromkeys(self.factors, (FACTOR,))
        # the blocks' absolute maxima (absmax1) belong to 8-bit codes (state1)
        self.codes: Container[tuple[str, str]] = {
            (name, key.replace("absmax", "state")) for name, key in factors if key.startswith("absmax")
        }
        self._placed = {name: placed(parameter, replica) for name, parameter in parameters.items()}
        self._keys: dict[str, list[str]] = {}
        for name, key in factors:
            self._keys.setdefault(name, []).append(key)

    def ranges(self) -> list[ShardRange]:
        return [shard for name in self._parameters for shard, _ in self._ranges(name)]

    def visit(self, writing: bool = False) -> Visit:
        for name, parameter in self._parameters.items():
            places = self._ranges(name)
            keys = [*self.kinds[name][1:], *(key for _, key in places if key)]
            state = state_of(self._optimizer, parameter, keys, create=writing)
            for shard, key in places:
                for kind in self.kinds[shard.name]:
                    tensor = parameter.detach() if kind == WEIGHT else state[key or kind]
                    with _flattened(tensor, writing) as flat:
                        yield shard, kind, flat

    def weights(
        self, names: Container[str] | None = None, writing: bool = False
    ) -> Iterator[tuple[ShardRange, Tensor]]:
        for name, parameter in self._parameters.items():
            for shard, key in self._ranges(name):
                if not key and (names is None or name in names):
                    with _flattened(parameter.detach(), writing) as flat:
                        yield shard, flat

    def _ranges(self, name: str) -> list[tuple[ShardRange, str]]:
        """List this rank's regions of a parameter and of its factors, each with the factor's key in the optimizer."""
        parameter, ranges = self._parameters[name], []
        parts = [(name, "", *self._placed[name])]
        for key in self._keys.get(name, ()):
            factor = f"{name}.{key}"
            parts.append((factor, key, *factor_placed(parameter, key, self.factors[factor], self._replica)))
        for label, key, region, replica in parts:
            if region.numel:
                saved = region.split(*replica) if name in self._saved else range(0)
                ranges.append((ShardRange(label, region, saved), key))
        return ranges

    def finish(self, updates: int) -> None:
        set_updates(self._optimizer, updates)
        self.refresh()

    def refresh(self) -> None:
        self._reload()  # the optimizer's weights are those that are computed with, but for gathered copies

    def masters(self) -> Iterator[Master]:
        for name, parameter in self._parameters.items():
            numel = self._placed[name][0].numel
            if numel:
                yield Master(name, parameter, 0, numel, partial(_flat, parameter), tuple(parameter.shape))

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            region, (_, count) = self._placed[name]
            if region.numel and count > 1:
                yield f"{name} from {region.start}", _flat(parameter)


class Zero12Shards:
    """State under ZeRO-1 and 2 and DeepSpeed's bf16 optimizer: fp32 masters in flat groups, sharded over the ranks.

    `saved` holds the names that this rank saves. Only one of the two pipeline stages that share a weight saves it.
    `reload` copies masters that DeepSpeed does not, see DTensorShards.
    """

    factors: dict[str, tuple[int, ...]] = {}
    codes: Container[tuple[str, str]] = ()

    def __init__(
        self,
        parameters: dict[str, DeepSpeedParameter],
        optimizer,
        states: Kinds,
        saved: set[str],
        reload: Callable[[], None] = lambda: None,
    ):
        self._parameters, self._optimizer, self._saved, self._reload = parameters, optimizer, saved, reload
        self.kinds = with_weight(states)

    def ranges(self) -> list[ShardRange]:
        ranges = []
        for name, parameter in self._parameters.items():
            if parameter._hp_mapping is not None:
                place = parameter._hp_mapping.lp_fragment_address
                saved = range(place.numel if name in self._saved else 0)
                ranges.append(ShardRange(name, Region(place.start, place.numel), saved))
        return ranges

    def visit(self, writing: bool = False) -> Visit:
        # Reads the flat groups instead of DeepSpeed's fragments of the optimizer state. DeepSpeed 0.19 links those
        # fragments after the first group's first step, when the other groups have no state yet; theirs stay empty.
        base = self._optimizer.optimizer
        for shard in self.ranges():
            mapping = self._parameters[shard.name]._hp_mapping
            place, (flat,) = mapping.hp_fragment_address, base.param_groups[mapping.param_group_index]["params"]
            kinds = self.kinds[shard.name]
            state = state_of(base, flat, kinds[1:], create=writing)
            for kind in kinds:
                whole = flat if kind == WEIGHT else state[kind]
                yield shard, kind, whole.detach().narrow(0, place.start, place.numel)

    def weights(
        self, names: Container[str] | None = None, writing: bool = False
    ) -> Iterator[tuple[ShardRange, Tensor]]:
        for shard in self.ranges():
            if names is None or shard.name in names:
                mapping = self._parameters[shard.name]._hp_mapping
                (flat,) = self._optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
                place = mapping.hp_fragment_address
                yield shard, flat.detach().narrow(0, place.start, place.numel)

    def finish(self, updates: int) -> None:
        set_updates(self._optimizer.optimizer, updates)
        self.refresh()

    def refresh(self) -> None:
        self._optimizer.update_lp_params()
        self._reload()

    def masters(self) -> Iterator[Master]:
        groups = self._optimizer.optimizer.param_groups
        for shard in self.ranges():
            weight = self._parameters[shard.name]
            mapping, numel = weight._hp_mapping, shard.region.numel
            (flat,) = groups[mapping.param_group_index]["params"]
            working = partial(_part, weight, shard.region)
            yield Master(shard.name, flat, mapping.hp_fragment_address.start, numel, working, tuple(weight.shape))

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, parameter.detach()


class Zero3Shards:
    """State under ZeRO-3: each rank holds one partition of every parameter, in groups that may be swapped to NVMe.

    `optimizer` is a DeepSpeedZeroOptimizer_Stage3; its partitions and its swapping are private attributes.
    `reload` copies masters that DeepSpeed does not, see DTensorShards.
    """

    factors: dict[str, tuple[int, ...]] = {}
    codes: Container[tuple[str, str]] = ()

    def __init__(
        self,
        parameters: dict[str, DeepSpeedParameter],
        optimizer,
        states: Kinds,
        rank: int,
        reload: Callable[[], None] = lambda: None,
    ):
        self._parameters, self._optimizer, self._rank, self._reload = parameters, optimizer, rank, reload
        self.kinds = with_weight(states)
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def ranges(self) -> list[ShardRange]:
        return [shard for group in self._optimizer.fp16_groups for shard, _ in self._places(group)]

    def visit(self, writing: bool = False) -> Visit:
        for index, group in enumerate(self._optimizer.fp16_groups):
            with self._swapped_in(index, writing) as flat:
                kinds = self.kinds[self._names[id(group[0])]]  # the same for all parameters of a flat group
                state = state_of(self._optimizer.optimizer, flat, kinds[1:], create=writing)
                for shard, start in self._places(group):
                    for kind in self.kinds[shard.name]:
                        whole = flat if kind == WEIGHT else state[kind]
                        yield shard, kind, whole.detach().narrow(0, start, shard.region.numel)

    def weights(
        self, names: Container[str] | None = None, writing: bool = False
    ) -> Iterator[tuple[ShardRange, Tensor]]:
        for index, group in enumerate(self._optimizer.fp16_groups):
            wanted = [parameter for parameter in group if names is None or self._names[id(parameter)] in names]
            if wanted:
                with self._swapped_in(index, writing) as flat:
                    for shard, start in self._places(wanted):
                        yield shard, flat.detach().narrow(0, start, shard.region.numel)

    def finish(self, updates: int) -> None:
        set_updates(self._optimizer.optimizer, updates)
        self.refresh()

    def refresh(self) -> None:
        zero = self._optimizer
        for index, group in enumerate(zero.fp16_groups):
            with self._swapped_in(index, writing=False) as flat:
                for parameter in group:
                    self._refresh_one(parameter, flat)
        zero.invalidate_secondary_tensor()  # hpZ's second copy, which the next step would gather
        self._reload()

    def _refresh_one(self, parameter: DeepSpeedParameter, flat: Tensor) -> None:
        """Set the working weight to its fp32 master in the group's `flat` weights. Collective."""
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus

        zero = self._optimizer
        _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
        partition = flat.detach().narrow(0, offset, length)
        alone = parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
        if alone and parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            parameter.ds_tensor.data[:length].copy_(partition)
            return
        # a partition on NVMe, or a parameter that is already whole: DeepSpeed keeps small parameters whole
        full = zero._fp32_state_allgather(parameter, partition.to(parameter.device))
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.data.copy_(full)

    @contextmanager
    def _swapped_in(self, index: int, writing: bool) -> Iterator[Tensor]:
        """Yield a group's flat fp32 weights, swapped in from NVMe if needed and swapped out again if `writing`."""
        zero = self._optimizer
        swapped = zero._swappable_optimizer_subgroup(index)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield zero.fp32_partitioned_groups_flat[index]
        finally:  # also after a failed save: the next step needs the buffers
            if swapped and writing:
                zero._optimizer_states_and_gradient_swap_out(index)
            elif swapped:
                zero._release_swap_buffers(index)

    def masters(self) -> Iterator[Master]:
        zero = self._optimizer
        for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            for shard, start in self._places(group):
                parameter = self._parameters[shard.name]
                working = partial(working_partition, parameter, shard.region)
                yield Master(shard.name, flat, start, shard.region.numel, working, tuple(parameter.ds_shape))

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def _places(self, group: Iterable[DeepSpeedParameter]) -> Iterator[tuple[ShardRange, int]]:
        """Yield this rank's region of each weight that it has a part of, and where it begins in the flat tensor."""
        for parameter in group:
            start = self._rank * parameter.partition_numel()
            stop = min(start + parameter.partition_numel(), parameter.ds_numel)  # the last partition is padded
            if start < stop:
                _, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                yield ShardRange(self._names[id(parameter)], Region(start, stop - start), range(stop - start)), offset


def working_partition(parameter: DeepSpeedParameter, region: Region) -> Tensor | None:
    """Return this rank's partition of a ZeRO-3 weight; None if it is on NVMe."""
    from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus

    if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # DeepSpeed keeps small weights whole
        return _part(parameter, region)
    partition = parameter.ds_tensor
    return partition.narrow(0, 0, region.numel) if partition.status == PartitionedParamStatus.AVAILABLE else None


def _part(weight: Tensor, region: Region) -> Tensor:
    return _flat(weight).narrow(0, region.start, region.numel)


@contextmanager
def _flattened(tensor: Tensor, writing: bool) -> Iterator[Tensor]:
    """Yield the flattened local part of a tensor; if `writing`, changes of it persist."""
    flat = _flat(tensor)
    yield flat
    if writing and not tensor.is_contiguous():  # `flat` is a copy, as of weights in channels_last
        tensor.copy_(flat.view(tensor.shape))


def _flat(tensor: Tensor) -> Tensor:
    return to_local(tensor).detach().reshape(-1)


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Set the optimizer's step counter, from which Adam computes its bias correction."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(updates)
        elif "step" in state:
            state["step"] = updates
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        # DeepSpeed's CPU Adam updates beta ** step by a multiplication in fp32 at each step (0.19.8,
        # csrc/includes/cpu_adam.h); only the same multiplications give the same bits
        cpu_adam, group = cast(Any, optimizer), optimizer.param_groups[0]
        values = [torch.zeros(1) for _ in range(4)]
        beta1, beta2 = group["betas"]
        for step in range(1, updates + 1):
            cpu_adam.ds_opt_adam.adam_update(
                cpu_adam.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *values
            )


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, names: Iterable[str], create: bool) -> dict:
    """Return the optimizer's state of a parameter, or zeros before the first update.

    Args:
        parameter: one of its parameters, possibly a shard.
        names: keys of the state's tensors that must exist, for example "exp_avg".
        create: store the zeros in the optimizer.
    """
    state = optimizer.state.get(parameter) or {}  # [...] would store an empty one in this defaultdict
    if all(name in state for name in names):
        return state
    own = getattr(optimizer, "empty_state", None)  # of samecurve.optim's classes
    empty = own(parameter) if own is not None else {name: torch.zeros_like(parameter) for name in names}
    if own is None and "exp_avg_sq" in empty:  # only Adam's bias correction counts steps
        # fused and capturable kernels need the counter on the weight's device, the others on the CPU
        near = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        device = parameter.device if near else "cpu"
        is_int = type(optimizer).__name__ == "DeepSpeedCPUAdam"
        empty = {"step": 0 if is_int else torch.tensor(0.0, dtype=torch.float32, device=device), **empty}
    made = {**state, **empty}
    if create:
        optimizer.state[parameter] = made
    return made
