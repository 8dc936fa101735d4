"""One optimizer step on one device, under DDP and under FSDP2, through accelerate.Accelerator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samecurve.distributed import rng_state
from samecurve.engines import fsdp, grad_cache, teacher
from samecurve.engines.forward import Forward, chunked_head, evaluation_sums
from samecurve.engines.gradient_norm import norms
from samecurve.engines.loss_scaler import LossScale
from samecurve.engines.memory_usage import held_bytes
from samecurve.engines.sharded_state import LiveState
from samecurve.interfaces.engine import EvalResult, StepResult, dtype_name, finished
from samecurve.interfaces.memory import Held
from samecurve.interfaces.sharded_state import State
from samecurve.models import bnb_4bit, compilation, liger
from samecurve.models.lora import trained_shapes
from samecurve.models.weights import build, fill
from samecurve.optim import factory
from samecurve.optim.dtensor import to_local
from samecurve.strategy import validate_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.data.batches import MicroBatch
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan

_PRECISION = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class AcceleratedEngine:
    """Single device, DDP, FSDP2 and HSDP. ZeRO overrides how a model is prepared, updated, written and read."""

    def __init__(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task):
        self.accelerator, self.plan, self.skeleton, self.task = accelerator, plan, skeleton, task
        self.recipe, self.device = plan.recipe, accelerator.device
        self.accumulation_steps = self.recipe.batch.accumulation_steps(accelerator.num_processes)
        self.shapes = trained_shapes(skeleton)
        self.matrices = factory.hidden_matrices(skeleton, self.shapes)
        self.loss_scale = LossScale() if self.recipe.precision == "fp16" else None
        self.model, self.optimizer = self._prepare()
        module = _unwrapped(self.model)
        self.tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        self.state = self._state({name: self.tensors[name] for name in self.shapes})
        with torch.no_grad():
            fill(skeleton, self.recipe, self._write)
        self.forward = Forward(self.model, task, self.device, chunked_head(module, skeleton, task, self.recipe))
        if task.teacher is not None:
            self.forward.teacher = teacher.build(accelerator, plan, task.teacher, task.vocabulary_size)

    # What the loop asks

    @property
    def shard(self) -> tuple[int, int]:
        return self.accelerator.process_index, self.accelerator.num_processes

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        factory.set_learning_rate(self.optimizer, learning_rate)
        assert len(micro_batches) == self.accumulation_steps, "the loop's batch is not the recipe's"
        tokens = int(self._sum(sum(self.task.count(**batch.targets) for batch in micro_batches)))
        if tokens == 0:
            return StepResult(loss=0.0, grad_norm=0.0, tokens=0, applied=False)
        # DDP, FSDP and ZeRO average gradients over the ranks; the loss is a mean over tokens, not over ranks
        weight = self.accelerator.num_processes / tokens
        loss_sum = torch.zeros((), device=self.device)
        sums = torch.zeros(self.task.num_step_statistics, dtype=torch.float64, device=self.device)
        contexts = self._contexts(micro_batches)
        for index, (batch, context) in enumerate(zip(micro_batches, contexts, strict=True)):
            last = index == len(micro_batches) - 1
            with self._accumulating(last):
                loss, found = self.forward.step(batch, context)
                sums += found
                loss_sum += loss.detach()
                if last:
                    mean = self._sum(loss_sum) / tokens
                    # a loss can overflow where its gradient does not; this makes every engine skip the update
                    weight *= 1.0 if math.isfinite(mean) else math.nan
                self._backward(loss * weight, last)
        may_rescale = self._may_rescale()
        grad_norm, applied = self._update()
        return finished(mean, grad_norm, tokens, applied, may_rescale, self._statistics(sums))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        if self.task.context is not None:
            count = sum(self.task.count(**batch.targets) for batch in micro_batches)
            return EvalResult(math.nan, int(self._sum(count)), features=self.features(micro_batches))
        self.model.eval()
        with torch.no_grad():
            sums = sum(map(partial(self.forward.sums, partial(evaluation_sums, self.task)), micro_batches))
        self.model.train()
        tokens = int(self._sum(sum(self.task.count(**batch.targets) for batch in micro_batches)))
        loss, *statistics = self.accelerator.reduce(sums, reduction="sum").tolist()
        return EvalResult(loss=loss / max(tokens, 1), tokens=tokens, statistics=tuple(statistics))

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self.model.eval()
        found = self._features(micro_batches)
        self.model.train()
        return found.cpu()

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        for name in self.shapes:
            full = self._read(self.tensors[name])
            yield name, full.float().cpu() if self.accelerator.is_main_process else None

    def describe(self) -> dict:
        names = [name for name, _ in self.skeleton.named_parameters()]
        local = sum(self._local_numel(self.tensors[name]) for name in names)
        return {
            "engine": type(self.model).__name__,
            "optimizer": type(self.optimizer).__name__,
            "world_size": self.accelerator.num_processes,
            "data_parallel_size": self.accelerator.num_processes,
            "pipeline_stages": 1,
            "device": str(self.device),
            "num_parameters": self.skeleton.num_parameters(),
            "num_trained_parameters": sum(shape.numel() for shape in self.shapes.values()),
            "num_parameters_per_rank": local,
            "loss_implementation": self.forward.head.kind if self.forward.head else "full",
            "kernels": liger.replaced(_unwrapped(self.model)),
            **self._describe_teacher(),
            **self._describe_numbers(),
        }

    def held_bytes(self) -> Held:
        return held_bytes(self.model, self.optimizer, self.describe())

    @property
    def loss_scale_state(self) -> dict:
        return {"value": self.loss_scale.value, "good_steps": self.loss_scale.good_steps} if self.loss_scale else {}

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None:
        if self.loss_scale and values:
            self.loss_scale.value, self.loss_scale.good_steps = values["value"], values["good_steps"]

    # How one device, DDP and FSDP2 do it

    def _prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.plan.strategy.family == "fsdp":
            shards = self.accelerator.num_processes // self.plan.strategy.replicate_size
            validate_optimizer.check_shards(self.recipe.optimizer.name, self.shapes, shards)
            model = build(type(self.skeleton), self.skeleton.config, torch.device("meta"), self.recipe.adapter)
            model = factory.cast_weights(model, self.recipe.optimizer)
            compilation.prepare(model, self.recipe, self.device)
            model = fsdp.shard(self.accelerator, model)
        else:
            model = factory.cast_weights(self._whole(), self.recipe.optimizer)
            compilation.prepare(model, self.recipe, self.device)
            model = self.accelerator.prepare_model(model)
        settings, named = self.recipe.optimizer, _unwrapped(model).named_parameters()
        groups = factory.parameter_groups(named, self.shapes, settings, self.matrices)
        return model, factory.build_optimizer(groups, settings, self.recipe.precision, self.recipe.seed)

    def _whole(self) -> PreTrainedModel:
        if self.recipe.adapter.quantization:
            return bnb_4bit.build(self.skeleton, self.recipe, self.device)
        return build(type(self.skeleton), self.skeleton.config, torch.device(self.device), self.recipe.adapter)

    def _state(self, parameters: dict[str, nn.Parameter]) -> State:
        settings = self.recipe.optimizer
        states = factory.state_names(settings, self.shapes, self.matrices)
        factors = factory.factor_shapes(settings, self.shapes)
        return LiveState(parameters, self.optimizer, states, replica=self.shard, factors=factors)

    def _accumulating(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last or not fsdp.reduces_once(self.plan) else self.accelerator.no_sync(self.model)

    def _features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Of all ranks' rows."""
        return self.accelerator.gather(grad_cache.features(self.task, self.forward.logits, micro_batches))

    def _contexts(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        if self.task.context is None:
            return [{}] * len(micro_batches)
        with rng_state.rehearsed(self.device):
            context = self.task.context(self._features(micro_batches))
        return grad_cache.cut(context, self.shard, len(micro_batches))

    def _backward(self, loss: Tensor, last: bool) -> None:
        (loss * self.loss_scale.value if self.loss_scale else loss).backward()

    def _update(self) -> tuple[float, bool]:
        """(gradient norm before clipping, whether the weights changed)."""
        gradients = [to_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        scale = self.loss_scale.value if self.loss_scale else 1.0
        norm = self._global_norm(gradients) / scale
        applied = math.isfinite(norm)
        if applied:
            factor = min(1.0, self.recipe.optimizer.max_grad_norm / (norm + 1e-6)) / scale
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()
        # kept, they stay views of DDP's buckets; new ones would lie beside these until the last micro-batch
        in_buckets = isinstance(self.model, DistributedDataParallel) and self.accumulation_steps > 1
        self.optimizer.zero_grad(set_to_none=not in_buckets)
        if self.loss_scale:
            self.loss_scale.update(applied)
        return norm, applied

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """L2 norm over all parameters and shards; see `_norms`."""
        squares = norms(gradients).square().sum().to(self.device)
        if isinstance(next(self.model.parameters()), DTensor):
            squares = self._sum(squares) / self.plan.strategy.replicate_size
        return math.sqrt(squares)

    def _may_rescale(self) -> bool:
        """Whether an overflow may be one of fp16's range, which a smaller loss scale cures."""
        return self.loss_scale is not None and not self.loss_scale.exhausted

    def _write(self, name: str, full: Tensor) -> None:
        if bnb_4bit.is_quantized(self.tensors[name]):
            bnb_4bit.write(self.tensors[name], full)
            return
        fsdp.write(self.tensors[name].detach(), full)

    def _read(self, parameter: nn.Parameter) -> Tensor:
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
        return tensor

    def _local_numel(self, parameter: nn.Parameter) -> int:
        return to_local(parameter).numel()

    def _describe_teacher(self) -> dict:
        if self.forward.teacher is None:
            return {}
        return {"num_teacher_parameters_per_rank": sum(map(self._local_numel, self.forward.teacher.parameters()))}

    def _describe_numbers(self) -> dict:
        """Batch and clipping are this loop's own arithmetic here; the rest is asked of the live objects."""
        weight = next(self.model.parameters())
        sharded = isinstance(weight, DTensor)
        mesh = weight.device_mesh.shape if sharded else ()
        reduced = self._reduce_dtype(weight)
        offloaded = sharded and weight.to_local().device.type != self.device.type
        return {
            "precision": self._precision(),
            "micro_batch_size": self.recipe.batch.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_clipping": self.recipe.optimizer.max_grad_norm,
            "weight_dtype": dtype_name(weight.dtype),
            "reduce_dtype": dtype_name(reduced) if reduced else None,
            "whole_gradient_bytes": fsdp.whole_gradient_bytes(self.plan, self.shapes, reduced),
            "zero_stage": 0,
            "sharded": sharded,
            "replicate_size": mesh[0] if len(mesh) == 2 else 1,
            "offload": ["optimizer:cpu", "param:cpu"] if offloaded else [],
        }

    def _reduce_dtype(self, weight: nn.Parameter) -> torch.dtype | None:
        if isinstance(weight, DTensor):
            return self.model._get_fsdp_state()._mp_policy.reduce_dtype
        return weight.dtype if self.accelerator.num_processes > 1 else None

    def _precision(self) -> str:
        """What the forward pass computes in. Accelerate ignores a precision that it does not support somewhere."""
        if self.plan.strategy.family == "fsdp":
            policy = self.model._get_fsdp_state()._mp_policy
            return _PRECISION[policy.param_dtype]
        return self.accelerator.mixed_precision if self.accelerator.native_amp else "fp32"

    # Agreement between ranks

    def _statistics(self, sums: Tensor) -> tuple[float, ...]:
        return tuple(self.accelerator.reduce(sums, reduction="sum").tolist()) if sums.numel() else ()

    def _sum(self, value: Tensor | float) -> float:
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        return self.accelerator.reduce(total, reduction="sum").item()


def _unwrapped(model: nn.Module) -> nn.Module:
    """`accelerator.unwrap_model` would load deepspeed for every strategy."""
    return getattr(model, "module", model)
