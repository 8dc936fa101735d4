"""Script that loads an exported folder as its users will: with torch, transformers and peft, without this package.

    python reload.py FOLDER TENSORS SETTINGS

TENSORS is a safetensors file with the inputs by name and `expected`, the outputs; SETTINGS is a JSON object with
auto_class, trust_remote_code and dtype (export/verification.py). The last line of the output is a JSON object:

    transformers  version
    difference    largest absolute difference from the expected outputs
    largest       largest absolute value of the outputs
    rounding      largest change of the outputs when the loaded model computes in the dtype of the training
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

EXPECTED = "expected"
ADAPTER_CONFIG, ADAPTED_CONFIG = "adapter_config.json", "model_config"


def main(folder: Path, tensors: Path, settings: str) -> None:
    asked, inputs = json.loads(settings), load_file(tensors)
    expected = inputs.pop(EXPECTED)
    model = load(folder, asked["auto_class"], asked["trust_remote_code"])
    outputs = compute(model, inputs)
    report = {
        "transformers": transformers.__version__,
        "difference": largest(outputs - expected),
        "largest": largest(outputs),
        "rounding": 0.0,
    }
    # what the precision alone changes tells how much of the difference it can explain
    if asked["dtype"] != "float32":
        rounded = compute(model.to(getattr(torch, asked["dtype"])), inputs)
        report["rounding"] = largest(rounded - outputs)
    print(json.dumps(report))


def load(folder: Path, auto_class: str, trust_remote_code: bool) -> torch.nn.Module:
    """Load a whole model, or an adapter with its base model, in fp32 on the CPU."""
    options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if not (folder / ADAPTER_CONFIG).is_file():
        return _loader(folder, auto_class, trust_remote_code).from_pretrained(folder, **options).eval()
    from peft import PeftModel

    stored = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = stored["base_model_name_or_path"]
    loader = _loader(base, auto_class, trust_remote_code, stored.get("revision"))
    options["revision"] = stored.get("revision") or "main"
    if (folder / ADAPTED_CONFIG).is_dir():
        options["config"] = transformers.AutoConfig.from_pretrained(
            folder / ADAPTED_CONFIG, trust_remote_code=trust_remote_code
        )
    model = loader.from_pretrained(base, **options)
    for parameter in model.parameters():  # those beside quantized ones have their stored dtype (transformers 5.23)
        parameter.data = parameter.data.float()
    return PeftModel.from_pretrained(model, folder).eval()


def _loader(path: str | Path, auto_class: str, trust_remote_code: bool, revision: str | None = None) -> type:
    """Return the Auto class; for a model that also reads images the one that loads all of it, not its text part."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
    if auto_class == "AutoModelForCausalLM" and config.get_text_config() is not config:
        auto_class = "AutoModelForImageTextToText"
    return getattr(transformers, auto_class)


@torch.no_grad()
def compute(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**inputs)
    return (output.logits if "logits" in output else output.last_hidden_state).float()


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; nan if there is one."""
    return tensor.abs().max().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
