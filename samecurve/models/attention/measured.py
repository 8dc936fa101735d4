"""The fastest attention for packed documents by GPU, as the GPU benchmark found it: measured.json.

`bash scripts/bench_gpu.sh --only 8b-sft 8b-sft-varlen` writes the file (benchmarks/gpu/attention_table.py). It is empty
while nothing has been measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

PATH = Path(__file__).with_suffix(".json")
"""{device name: {"attention": name, "tokens_per_second": {name: rate}, "date": date, "versions": {name: version}}}."""


def packs_documents(recipe: Recipe) -> bool:
    """Whether rows hold several documents: conversations do; one long text has none, and sdpa needs no mask for it."""
    return recipe.task == "sft" and recipe.data.packing


def fastest(recipe: Recipe, path: Path = PATH) -> str | None:
    """Return the attention that `model.attention: auto` selects on this GPU by measurement; None: there is none."""
    if not (packs_documents(recipe) and recipe.precision == "bf16"):
        return None
    return _table(path).get(torch.cuda.get_device_name(), {}).get("attention")


def describe(recipe: Recipe, device: torch.device, path: Path = PATH) -> str:
    """Say for the header how `auto` chose where documents are packed on a GPU; "" elsewhere."""
    if recipe.model.attention != "auto" or device.type != "cuda" or not packs_documents(recipe):
        return ""
    row = _table(path).get(torch.cuda.get_device_name(device))
    if row is None:
        return "auto: nothing measured on this GPU yet, see docs/gpu.md"
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_second"].items())
    return f"auto: measured {row['date'][:10]}, tokens/s: {rates}"


def _table(path: Path) -> Mapping[str, dict]:
    return json.loads(path.read_text(encoding="utf-8"))
