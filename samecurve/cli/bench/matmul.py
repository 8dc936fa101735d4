"""The ceiling of this device: matrix multiplications per precision, of squares and of a recipe's layers, and copies."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from samecurve.bench import printing
from samecurve.config import loader as recipes
from samecurve.config.schema import Recipe

SIZES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024, 2048)}
LAYER_WIDTH = {"cuda": 4096, "cpu": 256}  # small on a CPU: what it emulates can be hundreds of times slower
COPY_MIB = {"cuda": 1024, "cpu": 256}  # more than any cache holds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="measure the shapes of its model's layers, too")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values")
    parser.add_argument("--precisions", metavar="a,b", help="of fp32, tf32, bf16, fp16; default: what suits the device")
    parser.add_argument("--sizes", metavar="a,b", help="of the squares")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number (default: %(default)s)")
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides) if arguments.recipe else None

    from samecurve.bench import matmul, timing
    from samecurve.models.matmul_speed import PRODUCTS, Shape

    device = timing.default_device()
    facts = timing.environment(device)
    printing.say(timing.told(facts))
    names = printing.chosen("--precisions", arguments.precisions, timing.DTYPES, timing.default_precisions(device))
    sizes = printing.integers("--sizes", arguments.sizes) or SIZES[device.type]
    squares = {name: {size: matmul.square(size, name, device, arguments.seconds) for size in sizes} for name in names}
    rows = [[f"{size} x {size}", *(f"{squares[name][size]:.3g}" for name in names)] for size in sizes]
    printing.show(["square", *names], rows, "TFLOP/s of matrix multiplications")
    width = LAYER_WIDTH[device.type]
    shape = Shape(width, width, width)
    training = {name: matmul.layer_rates(shape, name, device, arguments.seconds) for name in names}
    rows = [[run.replace("_", " "), *(f"{training[name][run]:.3g}" for name in names)] for run in PRODUCTS]
    printing.show(["product", *names], rows, f"TFLOP/s of what trains a linear layer, {shape}")
    copies = matmul.copies(COPY_MIB[device.type] * 2**20, device, arguments.seconds)
    printing.show(["copy", "GB/s"], [[where, f"{rate:.3g}"] for where, rate in copies.items()])
    measured = _layers(recipe, device, arguments.seconds) if recipe else {}
    measured |= {"tflops": squares, "training_tflops": training, "copies_gb_per_second": copies}
    printing.write(arguments.json, "matmul", facts, **measured)
    return 0


def _layers(recipe: Recipe, device, seconds: float) -> dict[str, object]:
    """As the recipe multiplies them: its precision, one micro-batch of tokens."""
    from samecurve.bench import matmul
    from samecurve.models import weights
    from samecurve.tasks import registry

    task = registry.load(recipe)
    skeleton = weights.skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    num_tokens = recipe.batch.micro_batch_size * recipe.batch.sequence_length
    times = [
        matmul.layer_time(layer, num_tokens, recipe.precision, device, seconds) for layer in matmul.layers(skeleton)
    ]
    rows = [
        [
            ", ".join(time.layer.names),
            str(time.layer.count),
            f"{time.layer.num_inputs} -> {time.layer.num_outputs}",
            *(f"{1e3 * each:.3g}" for each in (time.forward, time.input_gradient)),
            "frozen" if time.weight_gradient is None else f"{1e3 * time.weight_gradient:.3g}",
            f"{time.tflops:.3g}",
        ]
        for time in times
    ]
    columns = ["layer", "count", "shape", "forward ms", "input gradient ms", "weight gradient ms", "TFLOP/s"]
    printing.show(columns, rows, f"the recipe's layers in {recipe.precision}, {num_tokens:,} tokens at a time")
    limit = matmul.tokens_per_second(times, num_tokens)
    printing.say(f"a device that did nothing else would train {limit:,.0f} tokens/s")
    return {"layers": [asdict(time) for time in times], "tokens_per_second_limit": limit}
