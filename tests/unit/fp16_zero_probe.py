"""Run by test_fp16_zero.py: DeepSpeed's real ZeRO optimizer with its fp16 loss scale, on a CPU.

    python fp16_zero_probe.py STAGE smallest    # the scale is at its minimum, and some gradients overflow
    python fp16_zero_probe.py STAGE growing     # the scale doubles every few steps

DeepSpeed refuses fp16 on a CPU; told otherwise, its loss scaling runs there too. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from types import SimpleNamespace

import deepspeed
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from transformers.utils import ModelOutput

from samecurve.accelerator import cpu_bridge, deepspeed_introspection
from samecurve.accelerator.accelerator import Accelerator
from samecurve.accelerator.mesh import Mesh
from samecurve.data.micro_batch import MicroBatch
from samecurve.engines.forward import Forward
from samecurve.engines.zero import ZeroEngine
from samecurve.interfaces.task import Task
from samecurve.losses.cross_entropy import count_trained
from samecurve.models.fp32_weights import ExactValues
from samecurve.strategy.parallel_dims import ParallelDims

SMALLEST = 2
BROKEN = (False, True, True, False)
WINDOW, STEPS = 2, 7
SCALES = {
    "smallest": {"initial_scale_power": 1, "min_loss_scale": SMALLEST, "hysteresis": 1},
    "growing": {"initial_scale_power": 4, "loss_scale_window": WINDOW},
}


class Product(Task):
    """The loss is what the model gives; its gradient is multiplied by `factor`."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        logits.register_hook(lambda gradient: gradient * factor.to(gradient.dtype))
        return logits.float().sum()

    def count(self, labels: torch.Tensor, factor: torch.Tensor) -> int:
        return count_trained(labels)


class Dot(torch.nn.Linear):
    def forward(self, rows: torch.Tensor, input_ids: torch.Tensor) -> ModelOutput:
        return ModelOutput(logits=super().forward(rows))


def wrapped(stage: int, scale: str) -> ZeroEngine:
    cpu = type(get_accelerator())
    cpu.is_fp16_supported = lambda self: True
    cpu.supported_dtypes = lambda self: [torch.float, torch.half]
    cpu_bridge.leave_out_shared_memory()
    deepspeed.init_distributed("gloo")
    model = Dot(4, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it would hide a gradient of the wrong size
        "fp16": {"enabled": True, **SCALES[scale]},
    }
    made = ZeroEngine.__new__(ZeroEngine)
    made.accelerator = Accelerator(dims=ParallelDims(), cpu=True)
    made.device, made.task = torch.device("cpu"), Product()
    made.model, made.optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), config=config
    )
    made.accelerator.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(made.model)
    made.optimizer = DeepSpeedOptimizerWrapper(made.optimizer)  # whose step does nothing
    AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    made.recipe = SimpleNamespace(optimizer=SimpleNamespace(max_grad_norm=0.0))
    deepspeed_introspection.skip_at_smallest_scale(made.model)
    made.scaler = deepspeed_introspection.dynamic_scaler(made.model)
    made.grow_scale = deepspeed_introspection.grow_after_step(made.model)
    made.mesh = Mesh(ParallelDims(), 0, made.device)
    made.shard = made.mesh.shard
    made.forward = Forward(made.accelerator, made.mesh, made.model, made.task)
    made.first_step, made.exact = SimpleNamespace(is_over=True), ExactValues({}, made.device)
    return made


def micro_batch(factor: float = 1.0) -> MicroBatch:
    rows = torch.ones(1, 4, dtype=torch.half)
    inputs = {"rows": rows, "input_ids": rows.long()}
    return MicroBatch(inputs, {"labels": torch.zeros(1, dtype=torch.long), "factor": torch.tensor(factor)})


def main() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port.getsockname()[1]), "DS_ACCELERATOR": "cpu"}
    port.close()
    stage, scale = int(sys.argv[1]), sys.argv[2]
    engine = wrapped(stage, scale)
    found = smallest(engine) if scale == "smallest" else growing(engine)
    print("FOUND " + json.dumps(found | {"optimizer": type(engine.model.optimizer).__name__}), flush=True)
    os._exit(0)


def growing(engine: ZeroEngine) -> dict:
    """Each step: the scale before it, the norm, how far SGD moved the weights in units of the learning rate."""
    weight, steps = next(engine.model.parameters()), []
    for _ in range(STEPS):
        before, scale = safe_get_full_fp32_param(weight).clone(), engine.scaler.cur_scale
        result = engine.step([micro_batch()], learning_rate=1e-2)
        moved = (before - safe_get_full_fp32_param(weight)).mean().item() / 1e-2
        steps.append([scale, result.grad_norm, moved, engine.loss_scale_state["good_steps"]])
    return {"steps": steps}


def smallest(engine: ZeroEngine) -> dict:
    steps = []
    for broken in BROKEN:
        result = engine.step([micro_batch(float("inf") if broken else 1.0)], learning_rate=1e-2)
        steps.append([str(result.grad_norm), result.applied, result.refused])

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.model.optimizer.step = no_memory
    try:
        without_memory = str(engine.step([micro_batch()], learning_rate=1e-2))
    except torch.OutOfMemoryError as error:
        without_memory = f"{type(error).__name__}: {error}"
    return {"steps": steps, "without memory": without_memory}


if __name__ == "__main__":
    main()
