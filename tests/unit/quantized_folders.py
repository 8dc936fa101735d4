"""Model folders with quantized weights as they are published, made from a folder of transformers by the definitions."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = (16, 8)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
STATIC = {**FP8, "activation_scheme": "static", "weight_block_size": None}  # as Mistral publishes
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}
SETTINGS = {"mxfp4": {"quant_method": "mxfp4"}, "fp8": FP8, "static": STATIC, "channel": CHANNEL}


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of (..., columns): bytes (..., columns / 32, 16) and exponents (..., columns / 32)."""
    blocks = weight.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Of (rows, columns): values, and a scale for each block, those at the edges included."""
    rows, columns = weight.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = weight.new_zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def quantize(folder: Path, method: str) -> Path:
    """Quantize the matrices of the layers in `folder`, except routers: SETTINGS has the methods."""
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for name, weight in list(tensors.items()):
        matrix = weight.ndim == 2 and (name.endswith("_proj.weight") or ".experts." in name)
        if method == "mxfp4" and weight.ndim == 3:
            del tensors[name]
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(weight.transpose(1, 2))
        elif method == "fp8" and matrix:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8(weight, BLOCK)
        elif method == "static" and matrix:
            tensors[name], scale = fp8(weight, weight.shape)
            tensors[f"{name}_scale_inv"] = scale[0, 0].bfloat16()
            tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5).bfloat16()
        elif method == "channel" and matrix:
            tensors[name], tensors[f"{name}_scale"] = fp8(weight, (1, weight.shape[1]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS[method]}))
    return folder
