"""Whether what a script exported is what it has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from samecurve.prove.judge import distance
from samecurve.prove.modules import sketch
from samecurve.storage.records import read_record

ADAPTER = "adapter_model.safetensors"


def export_problem(folder: Path, base: str, records: list[dict[str, Any]]) -> str:
    """Read a model back as transformers or peft does, and compare it with the last of these steps; "" if they agree.

    Weights in 16 bits may differ by their rounding. The last token of each row has to end a generation, if all rows end
    with the same. base: folder of the model that was trained further, "" if there is none.
    """
    trained, everything = records[-1]["weights"], records[-1]["end"]
    is_adapter, model = (folder / "adapter_config.json").exists(), None
    if is_adapter:
        weights = load_file(folder / ADAPTER) if (folder / ADAPTER).exists() else {}
        expected = {_saved_name(name): (name, values) for name, values in trained.items()}
        if extra := sorted(weights.keys() - expected.keys()):
            return f"{len(extra)} tensors are not of the adapter, {extra[0]} the first: it holds what is not trained"
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        try:
            model = getattr(transformers, (config.architectures or ["AutoModel"])[0]).from_pretrained(folder)
        except OSError as error:  # a folder without weights
            return f"it is not read back: {str(error).partition(', found in')[0]}"
        weights, expected = (
            dict(model.named_parameters()),
            {name: (name, values) for name, values in everything.items()},
        )
    if lost := [name for name in expected if name not in weights or not weights[name].numel()]:
        return f"{len(lost)} of {len(expected)} trained tensors are not in it, {lost[0]} the first"
    for name, (own, values) in expected.items():
        value = distance(sketch(own, weights[name].float()), values, 1e-12)
        if not value <= (1e-6 if weights[name].dtype == torch.float32 else 0.01):
            return f"{name}, read back, is {value:.1e} away, relative, from that of the run"
    # another head, such as that of a reward model, leaves out the base's own, which no generation needs
    if model is None or not model.can_generate():
        return ""
    if base and Path(base).is_dir() and (lost := sorted(_names(Path(base)) - _names(folder))):
        return f"{len(lost)} tensors of {Path(base).name} are not in it, {lost[0]} the first"
    ends = {row["last"] for record in records for row in record["masks"]}
    read = ((name, read_record(folder / name).value) for name in ("generation_config.json", "config.json"))
    name, settings = next(((name, value) for name, value in read if value is not None), ("", {}))
    stops = settings.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    if name and len(ends) == 1 and not ends & {*stops}:
        return f"all rows end with token {ends.pop()}, and {name} stops at {stops}"
    return ""


def _names(folder: Path) -> set[str]:
    names = set[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= {*file.keys()}
    return names


def _saved_name(name: str) -> str:
    """Return the name that peft's get_peft_model_state_dict gives to an adapter's weight (0.21)."""
    for live, saved in (
        (".modules_to_save.default.", "."),
        ("lora_magnitude_vector.default.weight", "lora_magnitude_vector"),
        (".default.", "."),
    ):
        name = name.replace(live, saved)
    return name
