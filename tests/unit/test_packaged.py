"""Models packaged as multimodal: their text part trained alone, exported inside of the published model.

The reference is the published class of transformers: its losses with frozen towers, its names, its from_pretrained.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_export import tokenizer
from test_round_trip import recipe
from tiny_families import PACKAGED, packaged_config
from transformers import AutoModelForImageTextToText, GenerationConfig

from samecurve.export.hf_export import ExportTarget, export
from samecurve.models.packaged import package_of
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weight_files import read, weight_files
from samecurve.models.weights import constant_tensors, describe, load_weights
from samecurve.specs import model_families

IDS = torch.arange(3, 43).reshape(2, 20)
EVERY_DAY = ["gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5_moe", "qwen3_vl_moe"]
SOME = [*EVERY_DAY, *(pytest.param(name, marks=pytest.mark.full) for name in PACKAGED if name not in EVERY_DAY)]


def published(name: str, folder: Path):
    """What save_pretrained writes in bf16 of a model whose every number is random; and the model, in fp32."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(packaged_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.generation_config = GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=[2, 7, 0], pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def loaded(made):
    """(skeleton, live model)"""
    skeleton = build_skeleton(made, 100)
    live = construct(type(skeleton), skeleton.config, torch.device("cpu")).eval()
    tensors = {**dict(live.named_parameters()), **dict(live.named_buffers())}
    with torch.no_grad():
        load_weights(skeleton, made, lambda name, tensor: tensors[name].copy_(tensor))
    return skeleton, live


def exported(skeleton, live, made, folder: Path, **more) -> str:
    target = ExportTarget(folder, tokenizer(), **more)
    pairs = [*live.named_parameters(), *constant_tensors(skeleton, made)]
    return export(iter(pairs), skeleton, target, True)


def losses(model, steps: int = 3) -> list[float]:
    """Losses of SGD steps on IDS. The head's parameters may be tied to the embedding's."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, values = torch.optim.SGD(trained, 0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(input_ids=IDS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.parametrize("name", SOME)
def test_text_part_in_published_model(name, tmp_path):
    whole, made = published(name, tmp_path / "start"), recipe(tmp_path / "start")
    skeleton, live = loaded(made)
    package = package_of(skeleton)
    assert package is not None and type(package.model) is type(whole)
    own = {package.name(name) for name, _ in live.named_parameters()}
    for parameter_name, parameter in whole.named_parameters():
        parameter.requires_grad_(parameter_name in own)
    expected = losses(whole)
    assert losses(live) == pytest.approx(expected, abs=1e-6) and expected[0] > expected[-1]

    assert exported(skeleton, live, made, tmp_path / "model") == ""
    before, after = weight_files(str(tmp_path / "start")), weight_files(str(tmp_path / "model"))
    assert before.keys() == after.keys()
    kept = [name for name, stored in after.items() if stored.dtype == "BF16"]
    assert len(kept) >= 5 and describe(skeleton, made).package.startswith(f"text part of a {name.partition(':')[0]}; ")
    start, end = read(before, kept), read(after, kept)
    assert all(torch.equal(start[name], end[name]) and start[name].dtype == end[name].dtype for name in kept)
    again, info = type(whole).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    trained = dict(whole.named_parameters())
    assert {name for name, p in again.named_parameters() if not torch.allclose(p, trained[name], atol=1e-5)} == set()
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(input_ids=IDS).logits, live(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)
    contents = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("start", "model")]
    for content in contents:
        content.pop("dtype")
        content["text_config"].pop("dtype", None)
    assert contents[0] == contents[1]
    files = [json.loads((tmp_path / folder / "generation_config.json").read_text()) for folder in ("start", "model")]
    files[1].pop("_from_model_config")
    assert files[0] == files[1] | {"transformers_version": files[0]["transformers_version"]}


def test_every_packaged_family_is_tested():
    assert {name.partition(":")[0] for name in PACKAGED} == model_families.PACKAGED - {"gemma3n"}
