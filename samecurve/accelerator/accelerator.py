"""`samecurve.Accelerator`: Accelerate's class, under which a step is the same on any number of processes."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # not in utils without DeepSpeed
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from samecurve.accelerator import cpu_bridge, deepspeed_introspection, fsdp, launch_env
from samecurve.accelerator.deepspeed_prepare import DeepSpeedPrepare
from samecurve.accelerator.gradient_norm import place_gradients, squared_norm
from samecurve.accelerator.mesh import Mesh, copy_to_host
from samecurve.accelerator.prepared_data import PreparedData
from samecurve.accelerator.prepared_loader import PreparedLoader
from samecurve.accelerator.prepared_state import warn_of_unsaved_states
from samecurve.accelerator.states import States
from samecurve.accelerator.trackers import Trackers
from samecurve.distributed import network
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import ConfigurationError
from samecurve.optim.dtensor import local_gradient
from samecurve.specs.precision import compute_dtype
from samecurve.strategy.parallel_dims import ParallelDims

# Process groups stay referenced until the process exits. Otherwise DDP's Reducer may drop the last reference: the
# group's destructor then joins gloo's threads while it holds the GIL, which they may be waiting for (torch 2.13: a rank
# that had finished its work hung forever, in one of twenty runs on busy cores).
_WORLDS: list[dist.ProcessGroup] = []
_COUNTED = "_num_items_given"


class Accelerator(PreparedData, DeepSpeedPrepare, Trackers, States):
    """Accelerate's Accelerator with the same names and signatures, and a step that is exact.

    A step's gradient is that of one mean over all of its units (rows, or tokens with a label): of all micro-batches and
    processes together, however unevenly they are divided. Accelerate's own is a mean of the micro-batches' means.

    Args:
        count: returns the number of units over which the loss of a batch is a mean; by default as count_units.
        dims: arrangement of the processes; None: all of them read different rows, as the launcher's variables say.
        args, kwargs: Accelerate's own. A prepared DataLoader's batch_size is that of all processes together, its order
            a function of the seed and the epoch, and `save_state` has its position: whatever `dataloader_config` says
            of `split_batches`, `use_seedable_sampler` and `use_stateful_dataloader`.

    Attributes:
        mesh: the processes by their parallel dimensions.
    """

    def __init__(
        self,
        *args: Any,
        count: Callable[[Any], int] | None = None,
        dims: ParallelDims | None = None,
        **kwargs: Any,
    ):
        bound = inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if value is not None}
        own_policy = getattr(given.get("fsdp_plugin"), "mixed_precision_policy", None)
        # DeepSpeed 0.19 calls functions that torch 2.13 has renamed, and Accelerate 1.15 passes DDP an option under the
        # name that torch 2.13 deprecates and torch 2.11 knows alone: both would warn on every rank.
        names = "all_gather_into_tensor|reduce_scatter_tensor"
        warnings.filterwarnings("ignore", rf"`torch\.distributed\.({names})` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        super().__init__(**(given if dims else _for_script(given)))
        if (world := dist.group.WORLD) is not None:
            _WORLDS.append(world)
        self.count, self._is_script = count, dims is None
        self.mesh = Mesh(dims or self._script_dims(), self.process_index, self.device)
        if self.autocast_handler is not None and not self.autocast_handler.enabled and self.scaler is None:
            self.native_amp = False  # weights are cast layer by layer; Accelerate would still wrap the model's forward
        if self._is_script:
            # On all processes now: `save_state` may be called by one alone. No watchdog ends a script.
            self._control = ControlGroup(timeout=self.init_handler.timeout if self.init_handler else None)
            if self.distributed_type == DistributedType.FSDP and not self.is_fsdp2:
                raise ConfigurationError("FSDP: set fsdp_version: 2 (FullyShardedDataParallelPlugin(fsdp_version=2))")
            if self.mixed_precision == "fp16" and self.device.type == "cpu":
                raise ConfigurationError("mixed_precision: fp16 needs a GPU, Accelerate would train fp32; use bf16")
            if self.is_fsdp2 and fsdp.plugin_of(self).ignored_modules is not None:
                raise ConfigurationError(
                    "fsdp_ignored_modules: nothing would reduce their gradients; freeze them instead"
                )
            if self.is_fsdp2 and own_policy is None:
                own = {"no": "fp32", "fp8": "bf16"}  # as Accelerate's policy
                dtype = compute_dtype(own.get(self.mixed_precision, self.mixed_precision))
                policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
                fsdp.plugin_of(self).mixed_precision_policy = policy  # Accelerate's own reduces gradients in bf16
        self._step_taken = False  # by clip_grad_norm_ under DeepSpeed
        self._file_max_norm = 0.0  # of a step without clip_grad_norm_ under DeepSpeed
        self._grow_scale: Callable[[], None] | None = None

    def _script_dims(self) -> ParallelDims:
        if self.parallelism_config is not None:
            sizes: Any = self.parallelism_config
            if (others := sizes.tp_size * sizes.cp_size * sizes.sp_size) > 1:
                raise ConfigurationError(
                    f"parallelism_config: {others} processes share rows (tp, cp or sp), as only models of train.py can"
                )
            return ParallelDims(dp_replicate=sizes.dp_replicate_size, dp_shard=sizes.dp_shard_size)
        shards = self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return ParallelDims(**{"dp_shard" if shards else "dp_replicate": self.num_processes})

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See Accelerate. Warns of layers that compute something else on another number of processes.

        Warns after the first step of an optimizer whose states `save_state` cannot keep.

        Raises:
            ConfigurationError: DeepSpeed would leave out or replace an optimizer or a scheduler.
        """
        for part in args if self._is_script else ():
            if isinstance(part, torch.optim.Optimizer) and hasattr(part, "_optimizer_step_post_hooks"):
                warn_of_unsaved_states(part, self.is_main_process)  # not of one that is prepared already
        self._check_parts(args)
        warned = self._is_script and self.num_processes > 1 and self.is_main_process
        for model in (part for part in args if isinstance(part, nn.Module)):
            cpu_bridge.install_sync_batch_norm(model, self.device)
            if self._is_script:
                model.register_forward_pre_hook(_note_num_items, with_kwargs=True)
            if warned and (warning := _unequal_layers(model)):
                warnings.warn(warning, stacklevel=2)
            if self.deepspeed_plugin is not None:
                self._begin_deepspeed(model, args)
        prepared = super().prepare(*args, device_placement=device_placement)
        for part in prepared if isinstance(prepared, tuple) else (prepared,):
            if type(part) is DeepSpeedOptimizerWrapper:
                self._end_deepspeed(part)
            elif isinstance(part, nn.Module) and self._is_script:
                self.save_whole(part)
        return prepared

    def _end_deepspeed(self, optimizer: DeepSpeedOptimizerWrapper) -> None:
        """Let the prepared optimizer's `step` take the step, which Accelerate takes within `backward`."""
        optimizer.__class__, optimizer.take_step = _DeepSpeedOptimizer, self._take_deepspeed_step  # pyright: ignore
        self._file_max_norm = self._deepspeed.gradient_clipping()
        if self._is_script:
            self._grow_scale = deepspeed_introspection.grow_after_step(self._deepspeed)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        whole: Iterable[str] = (),
    ) -> nn.Module:
        """See Accelerate. Under FSDP2 `model` may be on the meta device; `whole` names weights that stay whole."""
        if self.is_fsdp2 and not evaluation_mode:
            self._models.append(model)
            return fsdp.shard(self, model, self.mesh, [*whole])
        return super().prepare_model(model, device_placement, evaluation_mode)

    def _prepare_fsdp2(self, *args: Any) -> tuple:
        """Shard the one model as the engines do, and give the optimizers its shards in place of its weights."""
        parts = [part if isinstance(part, nn.Module) else self._prepare_one(part, first_pass=True) for part in args]
        parts = [part if isinstance(part, nn.Module) else self._prepare_one(part) for part in parts]
        for index, model in enumerate(parts):
            if isinstance(model, nn.Module):
                model = fsdp.whole_model(self, model)
                names = {weight: name for name, weight in model.named_parameters()}
                parts[index] = model = self.prepare_model(model)
                shards = dict(model.named_parameters())
                optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    if any(weight not in names for weight in group["params"]):
                        raise ConfigurationError("FSDP2: the optimizer has a parameter that is not the model's")
                    group["params"] = [shards[names[weight]] for weight in group["params"]]
        return tuple(parts)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """See Accelerate."""
        self.accumulates = True
        with super().accumulate(*models):
            yield

    def backward(self, loss: Tensor, reduction: str = "mean", num_items: float | None = None, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch's loss to that of the step.

        Args:
            loss: a scalar: the mean over the units of this process's part of the micro-batch, or their sum.
            reduction: "mean" or "sum".
            num_items: for a sum, the units of the whole step, of all micro-batches and processes; None: as the prepared
                DataLoader has counted them.
            kwargs: as in Accelerate.

        Raises:
            ConfigurationError: num_items for a mean, or none for a sum that no loader counts.
        """
        for loader in self.gradient_state.dataloader_references:  # all that are read in turn
            if isinstance(loader, PreparedLoader):
                loader.note_backward()
        loss = loss * self._weight(reduction, num_items)
        if self.distributed_type == DistributedType.DEEPSPEED:
            if self._is_reduced:
                raise ConfigurationError(
                    "backward: called twice before optimizer.step(), of which DeepSpeed would lose one. Put each "
                    "micro-batch into `with accelerator.accumulate(model):`, or add the losses of a step up"
                )
            engine = self._deepspeed
            engine.set_gradient_accumulation_boundary(self.sync_gradients)
            engine.backward(loss, scale_wrt_gas=False, **kwargs)
            self._step_taken, self._is_reduced = False, self.sync_gradients
        elif self.scaler is not None:
            self.scaler.scale(loss).backward(**kwargs)
        else:
            loss.backward(**kwargs)

    def _weight(self, reduction: str, num_items: float | None) -> float:
        """Return the factor by which gradients of such losses, averaged over the ranks, add up to the step's."""
        if num_items is not None:
            if reduction != "sum":
                raise ConfigurationError(
                    f'backward: found num_items with reduction="{reduction}"; it divides a sum, so give the sum of the '
                    'losses and reduction="sum", or leave num_items out'
                )
            return self.mesh.loss_ranks / num_items
        if any(getattr(self.unwrap_model(model), _COUNTED, False) for model in self._models):
            return 1 / self.gradient_accumulation_steps  # what Accelerate's users multiply by
        units = self.units
        if units is None:  # no prepared loader counts: micro-batches are taken to be equally large
            if reduction == "sum":
                raise ConfigurationError(
                    'backward(reduction="sum"): no prepared loader counts the step, or its batches are not trained in '
                    "turn, each once; give num_items"
                )
            return 1 / self.gradient_accumulation_steps
        share = units.micro_batch if reduction == "mean" else min(units.micro_batch, 1)  # a copied row does not count
        weight = share * (self.mesh.loss_ranks / max(units.step, 1))
        # without `accumulate` each micro-batch counts as a step, and the script itself takes several for one
        return weight if self.accumulates else weight / self.gradient_accumulation_steps

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip the gradients of the step, as torch.nn.utils.clip_grad_norm_ does in one process.

        Under DeepSpeed, which clips while it updates, this takes the optimizer's step; `optimizer.step()` then does
        nothing more.

        Returns:
            The L2 norm before clipping, an fp64 scalar on the CPU: the same on every process and under every strategy.

        Raises:
            ConfigurationError: DeepSpeed clips other parameters than these, or by another norm.
        """
        given: list[Any] = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        if self.distributed_type == DistributedType.DEEPSPEED:
            if self._is_script:
                self._check_clipped(given, norm_type)
            norm = None  # not known before the step
            if self.sync_gradients:
                self._take_deepspeed_step(max_norm)
                norm = self._deepspeed.get_global_grad_norm()
            return torch.tensor(math.nan if norm is None else float(norm), dtype=torch.float64)
        if norm_type != 2:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        self.unscale_gradients()
        trained = [parameter for parameter in given if parameter.grad is not None]
        place_gradients(trained)
        norm = math.sqrt(*copy_to_host(squared_norm(trained, self.mesh))()) if trained else 0.0
        # with the 1e-6 of torch's clip_grad_norm_ and of DeepSpeed, so that all strategies clip alike
        factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        if factor != 1.0:
            torch._foreach_mul_([local_gradient(parameter) for parameter in trained], factor)
        return torch.tensor(norm, dtype=torch.float64)

    def _take_deepspeed_step(self, max_norm: float | None = None) -> None:
        """Let DeepSpeed clip and update, unless it has done so for this step."""
        if self._step_taken:
            return
        engine = self._deepspeed
        limit = self._file_max_norm if max_norm is None else max_norm
        engine.optimizer.clip_grad = limit
        engine._config.gradient_clipping = limit  # of stage 0 in fp32
        engine.step()
        self._step_taken, self._is_reduced = True, False
        if self._grow_scale and engine.was_step_applied():
            self._grow_scale()
        if self._is_script:
            deepspeed_introspection.read_models_whole()

    @property
    def _deepspeed(self) -> Any:
        wrapper = self.deepspeed_engine_wrapped
        assert wrapper is not None, "backward before prepare"
        return wrapper.engine


class _DeepSpeedOptimizer(DeepSpeedOptimizerWrapper):
    """DeepSpeed's optimizer, whose `step` takes the step: Accelerate's own takes it within `backward`."""

    take_step: Callable[[], None]

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            self.take_step()


def _for_script(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Prepare the process for a script of the user's own, and return Accelerate's arguments with our defaults."""
    sharded = "fsdp_plugin" in kwargs or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    deepspeed = "deepspeed_plugin" in kwargs or "deepspeed_plugins" in kwargs
    deepspeed = deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    distributed = sharded or deepspeed or int(os.environ.get("WORLD_SIZE", "1")) > 1
    handlers: list[Any] = list(kwargs.get("kwargs_handlers") or ())
    given = {type(handler) for handler in handlers}
    if sharded or deepspeed:
        launch_env.set_world_of_one()
    network.choose_interface()  # for the control group, also where Accelerate has NCCL
    if cpu_bridge.needed():
        cpu_bridge.prepare(distributed=distributed, sharded=sharded, deepspeed=deepspeed)
        if deepspeed:
            kwargs.pop("cpu", None)  # true anyway; Accelerate 1.15 would leave DeepSpeed's plugin out, and fail
        if distributed and InitProcessGroupKwargs not in given:
            handlers.append(InitProcessGroupKwargs(backend="gloo"))
    if DistributedDataParallelKwargs not in given:
        handlers.append(DistributedDataParallelKwargs(gradient_as_bucket_view=True))
    loaders: Any = kwargs.pop("dataloader_config", DataLoaderConfiguration())
    exact = {"split_batches": True, "use_seedable_sampler": True, "use_stateful_dataloader": False}
    defaults: dict[str, Any] = {"dataloader_config": replace(loaders, **exact)}
    if "gradient_accumulation_plugin" not in kwargs:
        steps = kwargs.pop("gradient_accumulation_steps", 1)
        steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(steps)))
        # DDP keeps whole gradients anyway; the others would need memory for them to reduce them only once
        sync_each_batch = sharded or deepspeed
        defaults["gradient_accumulation_plugin"] = GradientAccumulationPlugin(steps, sync_each_batch=sync_each_batch)
    return defaults | kwargs | {"kwargs_handlers": handlers}


def _note_num_items(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Note whether the script gives the units of the whole step to a model of transformers, which divides by them."""
    setattr(model, _COUNTED, kwargs.get("num_items_in_batch") is not None)


def _unequal_layers(model: nn.Module) -> str:
    """Name the layers whose result depends on which rows a process has; "" without any.

    A model of from_pretrained is in eval mode until its loop begins. Layers are left out that are in eval mode within a
    model in train mode, and those of a frozen model in eval mode.
    """
    if not model.training and not any(parameter.requires_grad for parameter in model.parameters()):
        return ""
    layers = {
        name or type(part).__name__: part for name, part in model.named_modules() if part.training >= model.training
    }
    norms = [
        name
        for name, part in layers.items()
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm | cpu_bridge.SyncBatchNorm)
    ]
    drops = []
    for name, part in layers.items():
        if isinstance(part, _DropoutNd):
            is_random = part.p > 0
        elif isinstance(part, nn.RReLU):
            is_random = part.lower < part.upper
        else:  # torch's LSTM and MultiheadAttention, DropPath, and layers of transformers that call functional.dropout
            is_random = any("drop" in key and isinstance(rate, float) and rate > 0 for key, rate in vars(part).items())
        drops += [name] if is_random else []
    lines = []
    if norms:
        lines.append(
            f"{norms[0]} and {len(norms) - 1} other BatchNorm layers normalize over the rows of one process: "
            "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
        )
    if drops:
        lines.append(
            f"{drops[0]} and {len(drops) - 1} other layers with dropout draw from a generator of each process: p=0 "
            "makes curves equal"
        )
    return "the curve will depend on the number of processes: " + "; ".join(lines) if lines else ""
