"""Models packaged as multimodal: their text part trained alone, exported inside of the published model.

The reference is the published class of transformers: its losses with frozen towers, its names, its from_pretrained.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from quantized_folders import quantize
from safetensors.torch import load_file, save_file
from test_config_overrides import recipe as overriding
from test_export import tokenizer
from test_round_trip import recipe
from tiny_families import PACKAGED, packaged_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from samecurve.config.schema import Adapter, Tokenizer
from samecurve.errors import ConfigurationError
from samecurve.export import reload
from samecurve.export.convert import copy_as
from samecurve.export.hf_export import ExportTarget, export
from samecurve.inference import merge_lora
from samecurve.models import hf_config
from samecurve.models import skeleton as skeletons
from samecurve.models.packaged import package_of
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weight_files import read, weight_files
from samecurve.models.weights import constant_tensors, describe, kept_tensors, load_weights
from samecurve.specs import model_families
from samecurve.specs.data_names import CHATML

IDS = torch.arange(3, 43).reshape(2, 20)
EVERY_DAY = ["gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5_moe", "qwen3_vl_moe"]
OTHERS = [name for name in PACKAGED if name not in (*EVERY_DAY, "paligemma")]
SOME = [*EVERY_DAY, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


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


def loaded(made, vocabulary_size: int = 100):
    """(skeleton, live model)"""
    skeleton = build_skeleton(made, vocabulary_size)
    live = construct(type(skeleton), skeleton.config, torch.device("cpu"), made.adapter).eval()
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


def test_published_config_is_read_once(start, monkeypatch):
    counted = Mock(side_effect=hf_config.stored_config)
    for module in (hf_config, skeletons):
        monkeypatch.setattr(module, "stored_config", counted)
    assert package_of(build_skeleton(recipe(start), 100)) and counted.call_count == 1


def test_text_part_that_looks_ahead_is_refused(tmp_path):
    published("paligemma", tmp_path)
    with pytest.raises(ConfigurationError, match="use_bidirectional_attention is True"):
        build_skeleton(recipe(tmp_path), 100)


def test_every_packaged_family_is_tested():
    assert {name.partition(":")[0] for name in PACKAGED} == model_families.PACKAGED - {"gemma3n"}


FAMILY = "qwen3_vl"


@pytest.fixture
def start(tmp_path):
    """The folder of a packaged model with a processor's file."""
    published(FAMILY, tmp_path / "start")
    (tmp_path / "start" / "preprocessor_config.json").write_text('{"size": 7}')
    return tmp_path / "start"


def test_chat_template_grows_published_config(start, tmp_path):
    made = recipe(start)
    made.tokenizer = Tokenizer(chat_template=CHATML)
    skeleton, live = loaded(made, 105)
    exported(skeleton, live, made, tmp_path / "model")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert again.config.text_config.vocab_size == again.get_input_embeddings().weight.shape[0] == 105
    assert again.get_output_embeddings().weight.shape[0] == 105
    assert (tmp_path / "model" / "preprocessor_config.json").read_text() == '{"size": 7}'


def test_vocabulary_grows_in_layers_embedding(tmp_path):
    published("gemma4", tmp_path / "start")
    made = recipe(tmp_path / "start")
    made.tokenizer = Tokenizer(chat_template=CHATML)
    skeleton, live = loaded(made, 105)
    exported(skeleton, live, made, tmp_path / "model")
    again, ids = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval(), torch.tensor([[3, 104, 5]])
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, live(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral3", {"rms_norm_eps": 0.01}),  # tied by the outer config alone
        ("qwen3_vl", {"rope_theta": 100.0}),
        ("qwen2_5_vl", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_overrides_of_text_part_are_exported(family, overrides, older, tmp_path):
    plain, file = published(family, tmp_path / "start"), tmp_path / "start" / "config.json"
    content = json.loads(file.read_text())
    if older:  # as transformers 4 wrote it
        rope = content["text_config"].pop("rope_parameters")
        content["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        file.write_text(json.dumps(content))
    made = overriding(str(tmp_path / "start"), overrides)
    skeleton, live = loaded(made)
    exported(skeleton, live, made, tmp_path / "model")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    with torch.no_grad():
        before, want, found = (model(input_ids=IDS).logits for model in (plain, live, again))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert (before - want).abs().max() > 1e-4
    sections = [model.config.get_text_config().rope_parameters.get("mrope_section") for model in (plain, again)]
    assert sections[0] == sections[1]


def test_unknown_tensors_of_published_class_are_refused(start):
    file = start / "model.safetensors"
    save_file({**load_file(file), "model.strange.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    made = recipe(start)
    with pytest.raises(ConfigurationError, match=r"Qwen3VLForConditionalGeneration does not have: model.strange \(1 t"):
        loaded(made)
    made.model = made.model.model_copy(update={"unknown_tensors": "drop"})
    skeleton, _ = loaded(made)
    description = describe(skeleton, made)
    assert description.unread_tensors == "model.strange (1 tensor)"
    count = sum(name.startswith("model.visual.") for name in weight_files(str(start)))
    assert description.package == f"text part of a qwen3_vl; model.visual ({count} tensors) kept as stored"


def test_export_without_start_model_is_text_part(start, tmp_path):
    made = recipe(start)
    skeleton, live = loaded(made)
    start.rename(tmp_path / "moved")
    lacks = exported(skeleton, live, made, tmp_path / "model")
    assert lacks.startswith("the export is a Qwen3ForCausalLM, the text part of the qwen3_vl alone, because ")
    assert str(start) in lacks and "export RUN --checkpoint latest makes the whole model" in lacks
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        torch.testing.assert_close(text(input_ids=IDS).logits, live(input_ids=IDS).logits)


def test_conversion_leaves_kept_tensors(start, tmp_path):
    made = recipe(start)
    skeleton, live = loaded(made)
    exported(skeleton, live, made, tmp_path / "model", shard_bytes=20_000)
    copy_as(tmp_path / "model", tmp_path / "fp16", torch.float16)
    before, after = weight_files(str(start)), weight_files(str(tmp_path / "fp16"))
    towers = [name for name in before if name.startswith("model.visual.")]
    assert {after[name].dtype for name in after} == {"F16", "BF16"}
    assert all(torch.equal(read(before, [name])[name], read(after, [name])[name]) for name in towers)
    index = json.loads((tmp_path / "fp16" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(stored.stop - stored.start for stored in after.values())
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "fp16").dtype == torch.float16


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma3", ["q_proj", "gate_proj"]),
        ("gemma3", "all-linear"),
        ("gemma3", r"model\.layers\.1\.self_attn\.(q|v)_proj"),
        ("llama4", "all-linear"),  # all but the router
    ],
)
def test_adapter_loads_on_published_class(family, targets, tmp_path):
    whole, made = published(family, tmp_path / "start"), recipe(tmp_path / "start")
    made.adapter = Adapter(name="lora", rank=2, alpha=4, target_modules=targets)
    skeleton, live = loaded(made)
    with torch.no_grad():
        for name, parameter in live.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    pairs = [(name, parameter) for name, parameter in live.named_parameters() if parameter.requires_grad]
    export(iter(pairs), skeleton, ExportTarget(tmp_path / "model", tokenizer()), True)
    with torch.no_grad():
        plain = whole(input_ids=IDS).logits
        adapted = PeftModel.from_pretrained(whole, tmp_path / "model").eval()
        logits, expected = adapted(input_ids=IDS).logits, live(input_ids=IDS).logits
    assert not [name for name, _ in adapted.named_parameters() if "lora_" in name and "vision" in name]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (logits - plain).abs().max() > 1e-3


def test_adapter_merges_into_quantized_package(tmp_path):
    """Its unquantized weights are bf16, and transformers leaves them so."""
    start, made = tmp_path / "start", recipe(tmp_path / "start")
    published("mistral3", start)
    quantize(start, "fp8")
    (start / "preprocessor_config.json").write_text('{"size": 7}')
    made.adapter = Adapter(name="lora", rank=2, alpha=4, target_modules=["q_proj"])
    skeleton, live = loaded(made)
    torch.nn.init.ones_(next(parameter for name, parameter in live.named_parameters() if "lora_B" in name))
    pairs = [(name, parameter) for name, parameter in live.named_parameters() if parameter.requires_grad]
    export(iter(pairs), skeleton, ExportTarget(tmp_path / "adapter", tokenizer()), True)
    merge_lora._merge(tmp_path / "adapter", str(start), tmp_path / "merged", False)
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == '{"size": 7}'
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    adapted = reload.load(tmp_path / "adapter", "AutoModelForCausalLM", False)
    with torch.no_grad():
        want, *others = (model(input_ids=IDS).logits for model in (live, merged, adapted))
    for logits in others:
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


def test_quantized_tower_is_checked_before_training(tmp_path):
    start, made = tmp_path / "start", recipe(tmp_path / "start")
    published("mistral3", start)
    quantize(start, "fp8")
    stored, (file,) = weight_files(str(start)), start.glob("*.safetensors")
    scale = next(name for name in stored if "vision_tower" in name and name.endswith("_scale_inv"))
    skeleton, _ = loaded(made)
    kept = [entry for entry in kept_tensors(skeleton, made).values() if entry.packed]
    assert kept and all(entry.num_bytes == 4 * (entry.stop - entry.start) for entry in kept)
    tensors = load_file(file)
    del tensors[scale]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=f"{scale.removesuffix('_scale_inv')}: F8_E4M3, and no scale is st"):
        describe(build_skeleton(made, 100), made)


def test_reload_compares_the_published_class(start, tmp_path):
    made = recipe(start)
    skeleton, live = loaded(made)
    exported(skeleton, live, made, tmp_path / "model")
    model = reload.load(tmp_path / "model", "AutoModelForCausalLM", False)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    inputs = {"input_ids": IDS, "position_ids": torch.arange(20).repeat(2, 1)}
    with torch.no_grad():
        torch.testing.assert_close(reload.compute(model, inputs), live(**inputs).logits)
