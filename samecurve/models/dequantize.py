"""Published quantized weights: found among the stored tensors, and dequantized to fp32 while they are read.

Values and scales, each pair one weight (`*` is its name; a scale is multiplied, although some names say `inv`):

    mxfp4               *_blocks, *_scales         pairs of e2m1, a power of two per 32 columns; stacks, transposed
    fp8                 *, *_scale_inv or *_scale  e4m3, a scale per block (weight_block_size), row or tensor; also
                                                   pairs of e2m1 with powers of two, as DeepSeek-V4 has them
    compressed-tensors  *, *_scale                 format float-quantized: e4m3, a scale per block, row or tensor

Sources: OCP Microscaling Formats (MX) 1.0, section 5.3; DeepSeek-V3's README_WEIGHTS.md; transformers' integrations
mxfp4 and finegrained_fp8, with whose dequantizers the tests compare.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from samecurve.models.weight_files import Stored

FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_PAIRS = ("I8", "U8")  # two e2m1 values in a byte, the first in the low half
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BLOCK = 32
_SCALES = ("{}_scale_inv", "{}_scale", "{stem}scale", "{stem}qscale_weight")  # stem: the name without `weight`
# Scales of activations and of the attention's cache, which say how a server rounds those.
_ACTIVATIONS = re.compile(r"(^|[._])(activation_scale|input_scale|output_scale|qscale_act|[qkv]_scale)$")


class Packed(NamedTuple):
    """A quantized weight.

    Attributes:
        values: stored name.
        scales: stored name, "" if there are none.
        shape: of the weight.
        block: (rows, columns) that share a scale, None if the scales fit no block.
    """

    values: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None


class Contents(NamedTuple):
    """What files hold: the weights as the model knows them, which of them are packed, and the rest.

    Attributes:
        weights: by name, with the shape that they have after reading.
        packed: the quantized ones of them.
        activation_scales: names that nothing reads.
        method: quant_method of the config.
    """

    weights: dict[str, Stored]
    packed: dict[str, Packed]
    activation_scales: list[str]
    method: str = ""

    def __str__(self) -> str:
        """Describe what is dequantized, "" if nothing is."""
        counts = Counter(_layout(*item) for item in self.packed.items())
        texts = [f"{count:,} weight{'s' * (count > 1)} with a scale per {layout}" for layout, count in counts.items()]
        if self.activation_scales:
            texts.append(f"{len(self.activation_scales):,} scales of activations left out")
        return f"{self.method} ({'; '.join(texts)})" if counts else ""


def contents(files: dict[str, Stored], path: str, revision: str | None) -> Contents:
    """Find the quantized weights among the tensors of a model's files; see weight_files.weight_files."""
    if not any(stored.dtype in (*_FP8, *_PAIRS) for stored in files.values()):
        return Contents(files, {}, [])
    settings = stored_settings(path, revision)
    if _unreadable(settings):  # a config without the key, too: its tensors are refused one by one
        return Contents(files, {}, [])
    activation_scales = [name for name in files if _ACTIVATIONS.search(name)]
    rest = dict.fromkeys(name for name in files if name not in activation_scales)
    packed = {}
    for name, stored in files.items():
        base = name.removesuffix("_blocks")
        if settings["quant_method"] == "mxfp4" and base != name and f"{base}_scales" in files:
            *experts, rows, blocks, size = stored.shape
            shape = (*experts, blocks * size * 2, rows)
            fits = size * 2 == _MX_BLOCK and files[f"{base}_scales"].shape == stored.shape[:-1]
            packed[base] = Packed(name, f"{base}_scales", shape, (1, _MX_BLOCK) if fits else None)
        elif settings["quant_method"] != "mxfp4" and stored.dtype in (*_FP8, *_PAIRS):
            names = [pattern.format(name, stem=name.removesuffix("weight")) for pattern in _SCALES]
            scales = next((scales for scales in names if scales in files), "")
            if scales or stored.dtype in _FP8:
                *more, width = stored.shape or (1,)
                shape = (*more, width * (2 if stored.dtype in _PAIRS else 1))
                block = _block(shape, files[scales].shape, settings) if scales else None
                packed[name] = Packed(name, scales, shape, block)
    for name, weight in packed.items():
        rest.pop(weight.values)
        rest.pop(weight.scales, None)
        rest[name] = None
    weights = {
        name: files[packed[name].values]._replace(shape=packed[name].shape) if name in packed else files[name]
        for name in rest
    }
    return Contents(weights, packed, activation_scales, settings["quant_method"])


def problem(weight: Packed, files: Mapping[str, Stored]) -> str:
    """Return why a weight cannot be dequantized, "" if it can."""
    if not weight.scales:
        return f"{files[weight.values].dtype}, and no scale is stored with it; copy or download the folder again"
    if weight.block is None:
        shapes = files[weight.scales].shape, files[weight.values].shape
        return (
            "{} has the shape {}, which does not divide the values' {} by the quantization_config of config.json; "
            "is it another model's?"
        ).format(weight.scales, *shapes)
    return ""


def dequantize(values: Tensor, scales: Tensor, block: tuple[int, int], transposed: bool = False) -> Tensor:
    """Multiply values by their blocks' scales.

    A stack is dequantized one matrix at a time, so that nothing of its size is made beside the result.

    Args:
        values: (..., rows, columns) of fp8, or bytes (..., rows, columns / 2) of two e2m1 values, the first in the low
            half.
        scales: (..., rows / block[0], columns / block[1]), rounded up; bytes and e8m0 are exponents, 2**(byte - 127),
            and 255 is NaN.
        block: (rows, columns) that share a scale.
        transposed: return (..., columns, rows).

    Returns:
        (..., rows, columns) in fp32.
    """
    if values.ndim > 2:
        first = dequantize(values[0], scales[0], block, transposed)
        stack = first.new_empty((len(values), *first.shape))
        for index in range(len(values)):
            stack[index] = dequantize(values[index], scales[index], block, transposed) if index else first
        return stack
    if values.dtype in (torch.uint8, torch.int8):
        signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        pairs = torch.cartesian_prod(signed, signed).flip(1)  # by byte: (its low half, its high half)
        weight = pairs[values.view(torch.uint8).int()].flatten(-2)
    else:
        weight = values.to(torch.float32, copy=True)
    rows, columns = weight.shape
    factors = scale_values(scales).reshape(-(-rows // block[0]), -(-columns // block[1]))
    factors = factors.repeat_interleave(block[0], dim=0)[:rows] if block[0] < rows else factors
    whole = columns // block[1]
    weight[:, : whole * block[1]].unflatten(1, (whole, block[1])).mul_(factors[:, :whole, None])
    weight[:, whole * block[1] :].mul_(factors[:, whole:])
    return weight.T if transposed else weight


def scale_values(scales: Tensor) -> Tensor:
    """Return scales in fp32."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def stored_settings(path: str, revision: str | None) -> dict[str, Any]:
    """Read the quantization_config in a folder's or hub name's config.json, {} if its weights are not quantized."""
    fields, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    text = fields.get("text_config")
    settings = fields.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    return settings if isinstance(settings, dict) else {}


def adapter_problem(path: str, revision: str | None) -> str:
    """Return why transformers could not load an adapter of a model, whose own weights it then reads, "" if it can."""
    method = stored_settings(path, revision).get("quant_method")
    if method == "compressed-tensors" and importlib.util.find_spec("compressed_tensors") is None:
        return f"model.path: transformers needs the package {method} for an adapter of {path}; run pip install {method}"
    return ""


def take_settings(config: PreTrainedConfig, path: str) -> str:
    """Remove the quantization from a stored model's config, whose export holds unquantized weights.

    Returns:
        The reason why its weights cannot be read, "" if they can or are not quantized.
    """
    settings = None
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            settings = settings or part.quantization_config
            delattr(part, "quantization_config")
    unreadable = _unreadable(settings) if settings else ""
    if not unreadable:
        return ""
    base = _base_model(Path(path))
    named = f"its README.md says {base}" if base else "its model card says which base_model"
    return (
        f"model.path: {path} holds {unreadable} weights, which are not dequantized here (mxfp4, fp8 and "
        f"compressed-tensors' float-quantized are); name the unquantized model that it was made from ({named}), with "
        "adapter.quantization: 4bit if it is to be in 4 bits"
    )


def _unreadable(settings: dict[str, Any]) -> str:
    """Name the kind of weights, if they cannot be dequantized here; "" if they can."""
    method, kind = settings.get("quant_method"), settings.get("format")
    if method in ("mxfp4", "fp8"):
        return ""
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
        plain = all((group.get("type"), group.get("num_bits")) == ("float", 8) for group in weights)
        if kind == "float-quantized" and plain and not settings.get("transform_config"):
            return ""
    bits = settings.get("bits") or (4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None)
    details = ", ".join(part for part in (kind or "", f"{bits} bits" if bits else "") if part)
    return f"{method or 'quantized'}{f' ({details})' if details else ''}"


def _block(shape: tuple[int, ...], scales: tuple[int, ...], settings: dict[str, Any]) -> tuple[int, int] | None:
    """Find the block of (..., rows, columns) that a scale belongs to, from the number of scales."""
    rows, columns = (1, 1, *shape)[-2:]
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    known = [settings.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
    blocks = [*(tuple(block) for block in known if block), (1, columns), (rows, columns), (1, _MX_BLOCK)]
    grid = scales if len(scales) > 1 else (1, 1) if scales in ((), (1,)) else ()
    for block in blocks:
        if grid == (*shape[:-2], -(-rows // block[0]), -(-columns // block[1])):
            return block
    return None


def _layout(name: str, weight: Packed) -> str:
    if weight.block is None or weight.values != name:  # the second is mxfp4, whose shape is transposed
        return f"{_MX_BLOCK} values" if weight.block else "?"
    shape = weight.shape[-2:]
    names = {(1, _MX_BLOCK): f"{_MX_BLOCK} values", (1, *shape[1:]): "row", shape: "tensor"}
    return names.get(weight.block) or "block of {} x {}".format(*weight.block)


def _base_model(folder: Path) -> str:
    """Read `base_model` from the front matter of a model card."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    match = re.match(r"---\n(?:.*\n)*?base_model:[\s-]*([\w.-]+/[\w.-]+)", text)
    return match[1] if match else ""
