"""What the cases train on, made once in the benchmark's folder: a long text, and a folder with a model's first weights.

    python -m benchmarks.gpu.material RECIPE FOLDER [key=value ...]

writes such a model folder. samecurve draws the first weights of a new model on the CPU, one module at a time, which is
what makes them the same under any sharding; it takes 5 seconds per billion parameters on one core (measured in November
2026 on a 2-core AMD EPYC, with layers of the 1B width), and in every case anew. An adapter needs a folder anyway. Here
the weights are random numbers of the device, in bf16, which are read from the disk's cache from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from samecurve.data.sources import builtin_files

STANDARD_DEVIATION = 0.02  # transformers' initializer_range of a Llama
TEXT_BYTES = 8_000_000


def write_text(path: Path, num_bytes: int = TEXT_BYTES) -> Path:
    """The standard library as one document, so that no row has a boundary in it and attention needs no mask."""
    if path.exists():
        return path
    parts, size = [], 0
    for file in builtin_files():
        parts.append(file.read_text(encoding="utf-8", errors="ignore"))
        size += len(parts[-1])
        if size >= num_bytes:
            break
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(parts)[:num_bytes], encoding="utf-8")
    partial.rename(path)
    return path


def write_weights(recipe_path: str, folder: Path, overrides: list[str]) -> None:
    """A model folder with the recipe's config, random weights and a tokenizer that has a chat template."""
    import torch

    from samecurve.config import loader
    from samecurve.config.inheritance import latest_overrides
    from samecurve.export.hf_export import ExportTarget, export
    from samecurve.models.skeleton import build_skeleton
    from samecurve.tasks import registry

    conversations = ["task=sft", "data.path=builtin:python-functions"]  # whose tokenizer has a chat template
    checked = loader.load_recipe(recipe_path, latest_overrides([*overrides, *conversations]))
    task = registry.load_task(checked)
    skeleton = build_skeleton(checked, task.vocabulary_size, task.special_tokens, task.head)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(checked.seed)

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in skeleton.named_parameters():
            full = torch.ones(parameter.shape, device=device)
            if parameter.dim() > 1:  # a norm's weight stays 1
                full.normal_(std=STANDARD_DEVIATION, generator=generator)
            yield name, full

    export(parameters(), skeleton, ExportTarget(folder, task.tokenizer, dtype=torch.bfloat16), True)


if __name__ == "__main__":
    write_weights(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
