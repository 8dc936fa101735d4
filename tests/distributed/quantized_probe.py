"""Run under a launcher with train.py's arguments: a training that hashes what quantized layers multiply with.

Each rank writes output_dir/quantized_RANK.json after its second step: `hashes`, of each layer's dequantized weight in
all of its products, and `bytes`, those of stored integers that this rank keeps between steps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import train
from samecurve.models.quantized import QuantizedLinear
from samecurve.run import lifecycle


def stored_bytes(layer: QuantizedLinear) -> int:
    weight: Any = layer.weight
    kept = weight.to_local() if isinstance(weight, DTensor) else weight.detach()
    partition = getattr(weight, "ds_tensor", None)
    return kept.untyped_storage().nbytes() + (partition.untyped_storage().nbytes() if partition is not None else 0)


def hashed(loop: Callable[[Any], None]) -> Callable[[Any], None]:
    def train_loop(session: Any) -> None:
        module = session.engine.model
        layers = {layer: name for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)}
        hashes, dequantize, step, steps = defaultdict(set), QuantizedLinear.dequantize, session.engine.step, []

        def watched(layer: QuantizedLinear, packed: torch.Tensor) -> torch.Tensor:
            full = dequantize(layer, packed)
            content = full.view(torch.uint8).numpy().tobytes()
            hashes[layers[layer].removeprefix("module.")].add(hashlib.sha256(content).hexdigest())
            return full

        def watched_step(*arguments: Any) -> Any:
            result = step(*arguments)
            steps.append(None)
            if len(steps) == 2:
                path = Path(session.context.recipe.output_dir) / f"quantized_{os.environ.get('RANK', 0)}.json"
                bytes_kept = sum(map(stored_bytes, layers))
                found = {"hashes": {name: sorted(values) for name, values in hashes.items()}, "bytes": bytes_kept}
                path.write_text(json.dumps(found))
            return result

        setattr(QuantizedLinear, "dequantize", watched)  # noqa: B010 - pyright compares the parameters' names
        session.engine.step = watched_step
        loop(session)

    return train_loop


if __name__ == "__main__":
    train.train = hashed(train.train)
    lifecycle.end_with(train.main)
