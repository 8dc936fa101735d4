"""Benchmark of a device's peak: multiplication of square matrices and of a model's layers, and memory copies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from samecurve.bench import printing, timing
from samecurve.bench.timing import interleaved, precision_of, seconds_of
from samecurve.models import lora
from samecurve.models.matmul_speed import PRODUCTS, Shape, matmul_runs
from samecurve.specs.precision import MATMUL_PRECISIONS
from samecurve.tasks import registry
from samecurve.tasks.task_skeleton import skeleton_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

ROUNDS = 3
SIZES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024, 2048)}
LAYER_WIDTH = {"cuda": 4096, "cpu": 256}  # small on a CPU: emulated precisions can be hundreds of times slower
COPY_MIB = {"cuda": 1024, "cpu": 256}  # larger than any cache


@dataclass(frozen=True)
class LayerShapes:
    """All weight matrices of one shape, either all trained or all frozen.

    Attributes:
        names: names of their modules.
        count: number of them in the model.
    """

    names: tuple[str, ...]
    count: int
    num_inputs: int
    num_outputs: int
    trained: bool = True


@dataclass(frozen=True)
class LayerTime:
    """Seconds of each of the three multiplications that train a layer, and their rate.

    weight_gradient: None if the layer is frozen.
    """

    layer: LayerShapes
    forward: float
    input_gradient: float
    tflops: float
    weight_gradient: float | None = None

    @property
    def seconds(self) -> float:
        return self.forward + self.input_gradient + (self.weight_gradient or 0.0)


def square(size: int, precision: str, device: torch.device, at_least: float) -> float:
    """Measure TFLOP/s of (size, size) @ (size, size) in the layout of a linear layer; each costs 2 size^3 FLOPs.

    Args:
        size: rows and columns of both matrices.
    """
    shape = Shape(size, size, size)
    with precision_of(precision) as dtype:
        return shape.flops / seconds_of(matmul_runs(device, dtype, shape)["forward"], at_least) / 1e12


def layer_rates(shape: Shape, precision: str, device: torch.device, at_least: float) -> dict[str, float]:
    """Measure TFLOP/s of each of the three multiplications that train a layer.

    Args:
        shape: tokens, inputs and outputs of the layer.

    Returns:
        Rate by name: forward, input_gradient, weight_gradient.
    """
    with precision_of(precision) as dtype:
        runs = matmul_runs(device, dtype, shape)
        return {name: shape.flops / seconds_of(run, at_least) / 1e12 for name, run in runs.items()}


def layer_time(layer: LayerShapes, num_tokens: int, precision: str, device: torch.device, at_least: float) -> LayerTime:
    shape = Shape(num_tokens, layer.num_inputs, layer.num_outputs)
    with precision_of(precision) as dtype:
        runs = matmul_runs(device, dtype, shape)
        if not layer.trained:
            del runs["weight_gradient"]
        seconds = interleaved(runs, ROUNDS, at_least / ROUNDS)
    return LayerTime(layer, **seconds, tflops=len(runs) * shape.flops / sum(seconds.values()) / 1e12)


def tokens_per_second(times: list[LayerTime], num_tokens: int) -> float:
    """Compute the training rate of a device that does only these multiplications, once per layer of the model."""
    return num_tokens / sum(time.layer.count * time.seconds for time in times)


def layers(model: PreTrainedModel) -> list[LayerShapes]:
    """Group all linear layers, including the output head, by shape and whether they are trained.

    The model may be on the meta device.
    """
    from transformers.pytorch_utils import Conv1D

    names_by_kind: dict[tuple, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            shape = module.in_features, module.out_features
        elif isinstance(module, Conv1D):  # GPT-2's linear layer, whose weight is transposed
            shape = tuple(module.weight.shape)
        else:
            continue
        # without peft's suffixes (q_proj.base_layer, lora_A.default)
        own_name = [part for part in name.split(".") if part not in ("base_layer", lora.NAME)][-1]
        names_by_kind.setdefault((*shape, module.weight.requires_grad), []).append(own_name)
    return [LayerShapes(tuple(dict.fromkeys(names)), len(names), *kind) for kind, names in names_by_kind.items()]


def copies(num_bytes: int, device: torch.device, at_least: float) -> dict[str, float]:
    """Measure GB/s of copies by direction. On the device, reading and writing both count; over the bus only one."""
    one, other = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rates = {"on the device": 2 * num_bytes / seconds_of(lambda: one.copy_(other), at_least) / 1e9}
    if device.type == "cuda":
        host = torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
        to_device = seconds_of(lambda: one.copy_(host, non_blocking=True), at_least)
        to_host = seconds_of(lambda: host.copy_(one, non_blocking=True), at_least)
        rates |= {"host to device": num_bytes / to_device / 1e9, "device to host": num_bytes / to_host / 1e9}
    return rates


def run(arguments: argparse.Namespace, sizes: Sequence[int], recipe: Recipe | None) -> int:
    """Run the command `bench matmul`.

    Args:
        sizes: --sizes; empty for the device's default.
        recipe: if given, its model's layers are measured too.
    """
    device = timing.default_device()
    facts = timing.describe_environment(device)
    printing.print_line(timing.environment_line(facts))
    names = printing.parse_names(
        "--precisions", arguments.precisions, MATMUL_PRECISIONS, timing.default_precisions(device)
    )
    sizes = sizes or SIZES[device.type]
    squares = {name: {size: square(size, name, device, arguments.seconds) for size in sizes} for name in names}
    rows = [[f"{size} x {size}", *(f"{squares[name][size]:.3g}" for name in names)] for size in sizes]
    printing.print_table(["square", *names], rows, "TFLOP/s of matrix multiplications")
    width = LAYER_WIDTH[device.type]
    shape = Shape(width, width, width)
    training = {name: layer_rates(shape, name, device, arguments.seconds) for name in names}
    rows = [[product.replace("_", " "), *(f"{training[name][product]:.3g}" for name in names)] for product in PRODUCTS]
    printing.print_table(
        ["product", *names], rows, f"TFLOP/s of the multiplications that train a linear layer, {shape}"
    )
    rates = copies(COPY_MIB[device.type] * 2**20, device, arguments.seconds)
    printing.print_table(["copy", "GB/s"], [[where, f"{rate:.3g}"] for where, rate in rates.items()])
    measured = _recipe_layers(recipe, device, arguments.seconds) if recipe else {}
    measured |= {"tflops": squares, "training_tflops": training, "copies_gb_per_second": rates}
    printing.write_json_file(arguments.json, "matmul", facts, **measured)
    return 0


def _recipe_layers(recipe: Recipe, device: torch.device, seconds: float) -> dict[str, object]:
    """Measure the recipe's layers in its precision, with the tokens of one micro-batch."""
    task = registry.load_task(recipe)
    skeleton = skeleton_of(recipe, task)
    num_tokens = recipe.batch.micro_batch_size * recipe.batch.sequence_length
    times = [layer_time(layer, num_tokens, recipe.precision, device, seconds) for layer in layers(skeleton)]
    rows = [
        [
            ", ".join(time.layer.names),
            str(time.layer.count),
            f"{time.layer.num_inputs} -> {time.layer.num_outputs}",
            *(f"{1e3 * part_seconds:.3g}" for part_seconds in (time.forward, time.input_gradient)),
            "frozen" if time.weight_gradient is None else f"{1e3 * time.weight_gradient:.3g}",
            f"{time.tflops:.3g}",
        ]
        for time in times
    ]
    columns = ["layer", "count", "shape", "forward ms", "input gradient ms", "weight gradient ms", "TFLOP/s"]
    printing.print_table(columns, rows, f"the recipe's layers in {recipe.precision}, {num_tokens:,} tokens at a time")
    limit = tokens_per_second(times, num_tokens)
    printing.print_line(f"upper limit, from these multiplications alone: {limit:,.0f} tokens/s")
    return {"layers": [asdict(time) for time in times], "tokens_per_second_limit": limit}
