"""Published quantized weights against transformers' own dequantizers, and by hand."""

from __future__ import annotations

import gc
import json
import re
from importlib.util import find_spec
from itertools import accumulate

import pytest
import torch
from quantized_folders import CHANNEL, fp8, quantize
from safetensors.torch import load_file
from test_round_trip import IDS, loaded, logits, plain, recipe, rewritten, saved, shapes, step, written
from tiny_families import round_trip_config
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from samecurve.config.schema import Adapter
from samecurve.errors import ConfigurationError
from samecurve.inference import loading
from samecurve.models import dequantize as dequantization
from samecurve.models import pretrained
from samecurve.models.dequantize import dequantize
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weights import describe

# Experts are one stored tensor (gpt_oss) or one each (qwen3_moe, mixtral). The header's text, as a pattern.
CASES = {
    ("gpt_oss", "mxfp4"): r"mxfp4 \(4 weights with a scale per 32 values\)",
    ("qwen3", "fp8"): r"fp8 \(14 weights with a scale per block of 16 x 8\)",
    ("qwen3_moe", "fp8"): r"fp8 \(\d+ weights with a scale per block of 16 x 8\)",
    ("mixtral", "fp8"): r"fp8 \(\d+ weights with a scale per block of 16 x 8\)",
    ("mistral", "static"): r"fp8 \(14 weights with a scale per tensor; 14 scales of activations left out\)",
}


@pytest.mark.parametrize("family, method", CASES)
def test_trains_and_exports_what_transformers_dequantizes(family, method, tmp_path):
    unquantized = shapes(saved(family, tmp_path / "published"))
    folder = quantize(tmp_path / "published", method)
    shape, model = loaded(folder, family)
    assert re.fullmatch(CASES[family, method], describe(shape, recipe(folder)).dequantized)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(model.get_parameter(name), parameter), name
    losses = [cross_entropy(live(input_ids=IDS).logits[0, :-1], IDS[0, 1:]) for live in (model, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    step(model)
    ours = written(model, shape, tmp_path / "ours")
    assert shapes(ours) == unquantized
    config = json.loads((ours / "config.json").read_text())
    assert config["dtype"] == "float32" and "quantization_config" not in config
    torch.testing.assert_close(logits(plain(ours, family)), logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family, method", [("gpt_oss", "mxfp4"), ("mixtral", "fp8"), ("mistral", "static")])
def test_a_merged_base_model_is_stored_unquantized(family, method, tmp_path):
    """transformers would quantize it again: with other scales, and where the folder had one scale, to wrong values."""
    unquantized = shapes(saved(family, tmp_path / "published"))
    model = loading.load_model(str(quantize(tmp_path / "published", method)))
    model.save_pretrained(tmp_path / "merged")
    assert shapes(tmp_path / "merged") == unquantized
    assert torch.equal(logits(plain(tmp_path / "merged", family)), logits(model))


def test_compressed_tensors_are_values_times_scales(tmp_path):
    folder = quantize(saved("llama", tmp_path), "channel")
    shape, model = loaded(folder, "llama")
    assert describe(shape, recipe(folder)).dequantized == "compressed-tensors (14 weights with a scale per row)"
    stored, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    expected = stored[name].float() * stored[f"{name}_scale"]  # (rows, columns) * (rows, 1)
    assert torch.equal(model.get_parameter(name), expected)
    adapted = recipe(folder)
    adapted.adapter = Adapter(name="lora")
    if find_spec("compressed_tensors") is None:
        with pytest.raises(ConfigurationError, match="run pip install compressed-tensors"):
            build_skeleton(adapted, 100)


def test_by_hand():
    """Byte 0xA3 is +1.5 (low half, code 3) and -1 (high half, code 8 + 2); exponents are those of 2**(byte - 127)."""
    values = torch.zeros(1, 32, dtype=torch.uint8)
    values[0, 0] = values[0, 16] = 0xA3
    weight = dequantize(values, torch.tensor([[128, 126]], dtype=torch.uint8), (1, 32))
    assert weight.shape == (1, 64) and weight.count_nonzero() == 4
    assert weight[0, [0, 1, 32, 33]].tolist() == [3.0, -2.0, 0.75, -0.5]
    eighths = torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn)
    by_block = dequantize(eighths, torch.tensor([[1.0, 10.0]]), (2, 2))
    assert by_block.tolist() == [[0.0, 1.0, 20.0], [3.0, 4.0, 50.0]]


def test_all_bytes_and_exponents_as_transformers():
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 16, 16, 16).contiguous()
    scales = torch.arange(1, 253, dtype=torch.uint8).repeat(3)[: 2 * 16 * 16].view(2, 16, 16)
    theirs = convert_moe_packed_tensors(values, scales, dtype=torch.float32)
    assert torch.equal(dequantize(values.flatten(-2), scales, (1, 32), transposed=True), theirs)
    # DeepSeek-V4's experts: the same pairs as int8, with e8m0
    pairs, exponents = values[0].flatten(-2).view(torch.int8), scales[0].view(torch.float8_e8m0fnu)
    theirs = Fp8Dequantize(None)._dequantize_one(pairs, exponents, torch.float32)
    assert torch.equal(dequantize(pairs, exponents, (1, 32)), theirs)


@pytest.mark.parametrize("block", [(16, 16), (7, 5), (64, 128), (1, 40)])
@pytest.mark.skipif(not hasattr(finegrained_fp8, "_dequantize_fp8_weight"), reason="transformers up to 5.17 has none")
def test_blocks_at_the_edges_as_transformers(block):
    values, scales = fp8(torch.randn(33, 40), block)
    theirs = finegrained_fp8._dequantize_fp8_weight(values, scales, list(block), torch.float32)
    assert torch.equal(dequantize(values, scales, block), theirs)


@pytest.mark.parametrize("family, method", [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8"), ("qwen3_moe", None)])
def test_memory_of_one_parameter(family, method, tmp_path, monkeypatch):
    """Of 64 experts at most 1.1 times the parameter in fp32 is allocated while it is read, beside the mapped file."""
    config = round_trip_config(family)
    config.num_local_experts = config.num_experts = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if method:
        quantize(tmp_path, method)
    gc.collect()  # or tensors of earlier tests are freed below
    shape, name = build_skeleton(recipe(tmp_path), 100), "model.layers.1.mlp.experts.gate_up_proj"
    monkeypatch.setattr(dequantization, "_CHECKED", 2**12)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        ((_, tensor),) = pretrained.Pretrained(shape, shape, str(tmp_path)).tensors({name}, set())
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    mapped = (tmp_path / "model.safetensors").stat().st_size
    assert mapped in [change for _, change in changes]
    peak = max(accumulate(change for _, change in changes if abs(change) != mapped))
    assert tensor.shape[0] == 64 and tensor.nbytes <= peak < 1.1 * tensor.nbytes, peak / tensor.nbytes


SCALES = "model.layers.0.mlp.experts.gate_up_proj_scales"
MATRIX = "model.layers.1.mlp.down_proj.weight"
DAMAGE = {
    "no scale": (
        "qwen3",
        "fp8",
        lambda tensors: tensors.pop(f"{MATRIX}_scale_inv"),
        f"{MATRIX}: F8_E4M3, and no scale",
    ),
    "scales of other blocks": (
        *("qwen3", "fp8"),
        lambda tensors: tensors.update({f"{MATRIX}_scale_inv": torch.ones(3, 3)}),
        rf"{MATRIX}_scale_inv has the shape \(3, 3\), which does not divide the values' \(32, 48\)",
    ),
    "scales that are NaN": (
        *("gpt_oss", "mxfp4"),
        lambda tensors: tensors[SCALES].view(-1)[:2].fill_(255),
        f"{SCALES}: 2 of 512 values are NaN or infinite",
    ),
    "values that are NaN": (
        *("qwen3", "fp8"),
        lambda tensors: tensors[MATRIX].view(torch.uint8)[0, :3].fill_(127),
        f"{MATRIX}: 3 of 1,536 values are NaN or infinite",
    ),
    "blocks without scales": (
        *("gpt_oss", "mxfp4"),
        lambda tensors: tensors.pop(SCALES),
        "holds no tensor for model.layers.0.mlp.experts.gate_up_proj",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case, tmp_path):
    family, method, change, message = DAMAGE[case]
    folder = rewritten(quantize(saved(family, tmp_path), method), change)
    with pytest.raises(ConfigurationError, match=f"{folder}.*{message}"):
        loaded(folder, family)


REFUSED = {
    "gptq (4 bits)": {"quant_method": "gptq", "bits": 4},
    "awq (4 bits)": {"quant_method": "awq", "bits": 4},
    "bitsandbytes (4 bits)": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors (pack-quantized)": {**CHANNEL, "format": "pack-quantized"},
    "compressed-tensors (nvfp4-pack-quantized)": {**CHANNEL, "format": "nvfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_methods_are_refused_with_the_model_to_use(kind, tmp_path):
    folder = saved("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": REFUSED[kind]}))
    with pytest.raises(ConfigurationError) as error:
        build_skeleton(recipe(folder), 100)
    assert f"model.path: {folder} holds {kind} weights, which are not dequantized" in str(error.value)
    assert "its model card says which base_model" in str(error.value)
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model:\n- meta-llama/Llama-3.2-1B\n---\n# Card\n")
    with pytest.raises(ConfigurationError, match=r"its README.md says meta-llama/Llama-3.2-1B\)"):
        build_skeleton(recipe(folder), 100)
