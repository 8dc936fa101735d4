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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from samecurve.errors import ConfigurationError
from samecurve.models import weight_files
from samecurve.models.weight_files import Packed, Stored

FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_PAIRS = ("I8", "U8")  # two e2m1 values in a byte, the first in the low half
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BLOCK = 32
_CHECKED = 2**22  # values at a time
_SCALES = ("{}_scale_inv", "{}_scale", "{stem}scale", "{stem}qscale_weight")  # stem: the name without `weight`
# Scales of activations and of the attention's cache, which say how a server rounds those.
_ACTIVATIONS = re.compile(r"(^|[._])(activation_scale|input_scale|output_scale|qscale_act|[qkv]_scale)$")


class Contents(NamedTuple):
    """What a model's files hold.

    Attributes:
        weights: by name; quantized ones have `packed`.
        activation_scales: names of tensors that nothing reads.
        method: quant_method of the config, "" if nothing is quantized.
    """

    weights: dict[str, Stored]
    activation_scales: Sequence[str] = ()
    method: str = ""

    def __str__(self) -> str:
        """Describe what is dequantized, "" if nothing is."""
        counts = Counter[str]()
        for shape, packed in ((stored.shape[-2:], stored.packed) for stored in self.weights.values() if stored.packed):
            if packed.block is None:
                counts["?"] += 1
            elif packed.transposed:
                counts[f"{_MX_BLOCK} values"] += 1
            else:
                names = {(1, _MX_BLOCK): f"{_MX_BLOCK} values", (1, *shape[1:]): "row", shape: "tensor"}
                counts[names.get(packed.block) or "block of {} x {}".format(*packed.block)] += 1
        texts = [f"{count:,} weight{'s' * (count > 1)} with a scale per {layout}" for layout, count in counts.items()]
        if self.activation_scales:
            texts.append(f"{len(self.activation_scales):,} scales of activations left out")
        return f"{self.method} ({'; '.join(texts)})" if counts else ""


def contents(files: dict[str, Stored], path: str, revision: str | None) -> Contents:
    """Find the quantized weights among the tensors of a model's files; see weight_files.weight_files."""
    if not any(stored.dtype in (*_FP8, *_PAIRS) for stored in files.values()):
        return Contents(files)
    settings = stored_settings(path, revision)
    if _unreadable(settings):  # a config without the key, too: its tensors are refused one by one
        return Contents(files)
    activation_scales = [name for name in files if _ACTIVATIONS.search(name)]
    weights = {name: stored for name, stored in files.items() if name not in activation_scales}
    for name, stored in files.items():
        base = name.removesuffix("_blocks")
        if settings["quant_method"] == "mxfp4":
            scales = f"{base}_scales"
            if base != name and scales in files:
                *experts, rows, blocks, size = stored.shape
                fits = size * 2 == _MX_BLOCK and files[scales].shape == stored.shape[:-1]
                packed = Packed({name: stored, scales: files[scales]}, (1, _MX_BLOCK) if fits else None, True)
                del weights[name], weights[scales]
                weights[base] = stored._replace(shape=(*experts, blocks * size * 2, rows), packed=packed)
        elif stored.dtype in (*_FP8, *_PAIRS):
            names = [pattern.format(name, stem=name.removesuffix("weight")) for pattern in _SCALES]
            scales = next((scales for scales in names if scales in files), "")
            if scales or stored.dtype in _FP8:
                *more, width = stored.shape or (1,)
                shape = (*more, width * (2 if stored.dtype in _PAIRS else 1))
                block = _block(shape, files[scales].shape, settings) if scales else None
                parts = {part: files[part] for part in (name, scales) if part}
                weights.pop(scales, None)
                weights[name] = stored._replace(shape=shape, packed=Packed(parts, block))
    return Contents(weights, activation_scales, settings["quant_method"])


def read(stored: Mapping[str, Stored], names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors, dequantized to fp32 where they are quantized, else in their stored dtype.

    Raises:
        ConfigurationError: as weight_files.read, or a scale is not finite.
    """
    wanted = {name: stored[name] for name in names}
    parts: dict[str, Stored] = {}
    for name, entry in wanted.items():
        parts |= entry.packed.parts if entry.packed else {name: entry}
    raw, tensors = weight_files.read(parts, parts), {}
    for name, entry in wanted.items():
        if entry.packed is None:
            tensors[name] = raw.pop(name)
            continue
        (values, scales), block = entry.packed.parts, entry.packed.block
        assert block is not None  # Packed.problem is reported before a tensor is read
        check_finite(parts[scales], scales, _scale_values(raw[scales]))
        if entry.packed.transposed:
            raw[values] = raw[values].flatten(-2)  # mxfp4's (..., blocks, 16)
        tensors[name] = dequantize(raw.pop(values), raw.pop(scales), block, entry.packed.transposed)
    return tensors


def check_finite(stored: Stored, name: str, tensor: Tensor) -> None:
    """Raise ConfigurationError for a tensor with NaN or infinite values."""
    # in parts, because isfinite makes a tensor of absolute values
    finite = sum(int(torch.isfinite(part).sum()) for part in tensor.flatten().split(_CHECKED))
    if wrong := tensor.numel() - finite:
        raise ConfigurationError(
            f"{stored.file}: {name}: {wrong:,} of {tensor.numel():,} values are NaN or infinite, which would make "
            "every loss NaN; copy or download the file again, or start from another checkpoint"
        )


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
    factors = _scale_values(scales).reshape(-(-rows // block[0]), -(-columns // block[1]))
    factors = factors.repeat_interleave(block[0], dim=0)[:rows] if block[0] < rows else factors
    whole = columns // block[1]
    weight[:, : whole * block[1]].unflatten(1, (whole, block[1])).mul_(factors[:, :whole, None])
    weight[:, whole * block[1] :].mul_(factors[:, whole:])
    return weight.T if transposed else weight


def _scale_values(scales: Tensor) -> Tensor:
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
    # `base_model` in the front matter of a model card
    card, base = Path(path) / "README.md", None
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        base = re.match(r"---\n(?:.*\n)*?base_model:[\s-]*([\w.-]+/[\w.-]+)", text)
    named = f"its README.md says {base[1]}" if base else "its model card says which base_model"
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
