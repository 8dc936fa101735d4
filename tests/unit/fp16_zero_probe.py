"""Run by test_fp16_zero.py: DeepSpeed's real ZeRO optimizer with its fp16 loss scale at the minimum, on a CPU.

DeepSpeed refuses fp16 on a CPU; told otherwise, its loss scaling runs there too. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from samecurve.engines import cpu_bridge, deepspeed_introspection
from samecurve.engines.zero import ZeroEngine

SMALLEST = 2
BROKEN = (False, True, True, False)


def wrapped(stage: int) -> ZeroEngine:
    cpu = type(get_accelerator())
    cpu.is_fp16_supported = lambda self: True
    cpu.supported_dtypes = lambda self: [torch.float, torch.half]
    cpu_bridge._leave_out_shared_memory()
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(4, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": SMALLEST, "hysteresis": 1},
    }
    made = ZeroEngine.__new__(ZeroEngine)
    made.model, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    )
    return made


def main() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port.getsockname()[1]), "DS_ACCELERATOR": "cpu"}
    port.close()
    engine = wrapped(stage=int(sys.argv[1]))
    deepspeed_introspection.skip_at_smallest_scale(engine.model)
    found = {"optimizer": type(engine.model.optimizer).__name__, "steps": []}
    for broken in BROKEN:
        loss = engine.model(torch.ones(1, 4, dtype=torch.half)).float().sum()
        engine.model.backward(loss * float("inf") if broken else loss)
        may_rescale = engine._may_rescale()
        found["steps"].append([*map(str, engine._update()), may_rescale])

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.model.backward(engine.model(torch.ones(1, 4, dtype=torch.half)).float().sum())
    engine.model.optimizer.step = no_memory
    try:
        found["without memory"] = str(engine._update())
    except torch.OutOfMemoryError as error:
        found["without memory"] = f"{type(error).__name__}: {error}"
    print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
