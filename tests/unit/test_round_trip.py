"""A model that transformers wrote, loaded here, trained by a step, exported, and read by plain transformers again.

The references are transformers' own: the logits of its from_pretrained, and the names that its save_pretrained writes.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import CONSTANTS, ENCODERS, OTHERS, STORED_ALIKE, STORED_OTHERWISE, round_trip_config
from tokenizers import Tokenizer as Tokens
from tokenizers import models
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

from samecurve.config.rules_tasks import model_folder
from samecurve.config.schema import Adapter, Model, Optimizer, Tokenizer
from samecurve.data.tokenizer import load_pretrained_tokenizer
from samecurve.errors import ConfigurationError
from samecurve.export.hf_export import ExportTarget, export
from samecurve.inference import folders
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weight_conversion import groups
from samecurve.models.weight_files import weight_files
from samecurve.models.weights import load_weights
from samecurve.specs.heads import Head
from samecurve.specs.model_families import ROUND_TRIP

IDS = torch.arange(3, 15)[None]
AUTO = {family: AutoModelForCausalLM for family in (*STORED_OTHERWISE, *STORED_ALIKE, *OTHERS)}
AUTO |= dict.fromkeys(ENCODERS, AutoModelForMaskedLM)
EVERY_DAY = {*STORED_OTHERWISE, "bert", "bloom", "gpt2", "gpt_oss", "llama", "mamba"}


def saved(family: str, folder: Path, **options) -> Path:
    """What save_pretrained writes of a model whose every number is random."""
    torch.manual_seed(0)
    model = AUTO[family].from_config(round_trip_config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder, **options)
    return folder


def recipe(folder: Path, **more) -> SimpleNamespace:
    batch = SimpleNamespace(sequence_length=16)
    settings = Model(path=str(folder), **more)
    return SimpleNamespace(
        model=settings,
        tokenizer=Tokenizer(),
        adapter=Adapter(),
        optimizer=Optimizer(),
        seed=0,
        batch=batch,
        precision="fp32",
    )


def loaded(folder: Path, family: str):
    """(skeleton, live model)"""
    made = recipe(folder)
    head = Head("masked_lm") if family in ENCODERS else Head()
    shape = build_skeleton(made, 100, head=head)
    model = construct(type(shape), shape.config, torch.device("cpu"))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        load_weights(shape, made, lambda name, full: tensors[name].copy_(full))
    return shape, model.eval()


def step(model) -> None:
    cross_entropy(model.train()(input_ids=IDS).logits[0, :-1], IDS[0, 1:]).backward()
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def plain(folder: Path, family: str):
    """By transformers alone, without a word about a missing, unexpected or misshapen tensor."""
    model, found = AUTO[family].from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    model.config.use_cache = False
    return model.eval()


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: stored.shape for name, stored in weight_files(str(folder)).items()}


def written(model, shape, folder: Path, **options) -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokens(models.BPE()), eos_token="<eos>")
    export(iter(model.named_parameters()), shape, ExportTarget(folder, tokenizer, **options), True)
    return folder


def test_there_are_many_families_and_both_kinds():
    assert {*AUTO, *CONSTANTS} == ROUND_TRIP and len(STORED_OTHERWISE) >= 10
    for family in STORED_OTHERWISE:
        with torch.device("meta"):
            model = AUTO[family].from_config(round_trip_config(family))
        assert {name for name, _ in model.named_parameters()} != set(_stored_by_transformers(model)), family


def _stored_by_transformers(model) -> dict:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(model.named_parameters()))


@pytest.mark.parametrize(
    "family", [family if family in EVERY_DAY else pytest.param(family, marks=pytest.mark.full) for family in AUTO]
)
def test_round_trip(family, tmp_path):
    theirs = saved(family, tmp_path / "theirs")
    shape, model = loaded(theirs, family)
    before = logits(model)
    torch.testing.assert_close(before, logits(plain(theirs, family)), rtol=1e-5, atol=1e-6)
    step(model)
    ours = written(model, shape, tmp_path / "ours")
    assert shapes(ours) == shapes(theirs)
    after = logits(model)
    torch.testing.assert_close(logits(plain(ours, family)), after, rtol=1e-5, atol=1e-6)
    assert (after - before).abs().max() > 1e-3


def test_shards_and_bf16_and_the_experts_of_one_parameter_in_several_files(tmp_path):
    """On the way in and on the way out."""
    theirs = saved("mixtral", tmp_path / "theirs", max_shard_size="20KB")
    assert len(list(theirs.glob("*.safetensors"))) > 3
    shape, model = loaded(theirs, "mixtral")
    assert torch.equal(logits(model), logits(plain(theirs, "mixtral")))
    ours = written(model, shape, tmp_path / "ours", shard_bytes=20_000)
    assert shapes(ours) == shapes(theirs) and len(list(ours.glob("*.safetensors"))) > 3
    assert torch.equal(logits(plain(ours, "mixtral")), logits(model))
    half = written(model, shape, tmp_path / "half", dtype=torch.bfloat16)
    again = loaded(half, "mixtral")[1]
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16().float()), name


def test_a_part_of_the_parameters_is_the_same_as_in_the_whole(tmp_path):
    """A pipeline's stage asks for its own."""
    theirs = saved("olmo_hybrid", tmp_path)
    shape, model = loaded(theirs, "olmo_hybrid")
    part = {name for name, _ in shape.named_parameters() if ".layers.0." in name}
    found = {}
    load_weights(shape, recipe(theirs), lambda name, full: found.update({name: full.clone()}), part)
    assert found.keys() == part and len(part) > 5
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in found.items())


def test_no_more_is_read_at_a_time_than_one_parameter_is_made_of(tmp_path):
    theirs = saved("mixtral", tmp_path)
    with torch.device("meta"):
        model = AUTO["mixtral"].from_config(round_trip_config("mixtral"))
    made, _ = groups(model, shapes(theirs))
    assert {name for group in made for name in group.made} == {name for name, _ in model.named_parameters()}
    assert all(len(group.made) == 1 for group in made)
    experts = next(group for group in made if "model.layers.1.mlp.experts.gate_up_proj" in group.made)
    assert len(experts.sources) == 2 * 8 and all(".layers.1." in name for name in experts.sources)


def rewritten(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


LAYER = "model.layers.0.block_sparse_moe.experts"
DAMAGE = {
    "an expert is missing": (
        lambda tensors: tensors.pop(f"{LAYER}.7.w1.weight"),
        r"cannot make model.layers.0.mlp.experts.gate_up_proj \(",
    ),
    "one kind of all experts": (
        lambda tensors: [tensors.pop(f"{LAYER}.{index}.w2.weight") for index in range(8)],
        "holds no tensor for model.layers.0.mlp.experts.down_proj",
    ),
    "fewer experts than the config has": (
        lambda tensors: [tensors.pop(f"{LAYER}.7.{kind}.weight") for kind in ("w1", "w2", "w3")],
        r"would make model.layers.0.mlp.experts.down_proj with the shape \(7, 32, 48\), the config needs \(8, 32, 48\)",
    ),
    "quantized": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}),
        "model.safetensors: lm_head.weight: F8_E4M3, which is quantized, and the quantization_config of",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_makes_no_parameter_is_refused_before_one_is_read(case, tmp_path):
    change, message = DAMAGE[case]
    folder = rewritten(saved("mixtral", tmp_path), change)
    made, read = recipe(folder), []
    with pytest.raises(ConfigurationError, match=message):
        load_weights(build_skeleton(made, 100), made, lambda name, full: read.append(name))
    assert not read


def test_two_tensors_for_what_the_config_ties_are_refused(tmp_path):
    folder = saved("gpt2", tmp_path)
    rewritten(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    loaded(folder, "gpt2")
    rewritten(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ConfigurationError, match="lm_head.weight is not transformer.wte.weight, but the"):
        loaded(folder, "gpt2")


@pytest.mark.parametrize("kind", ["truncated", "header", "no safetensors at all", "empty"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_damaged_file_is_named(kind, shards, tmp_path):
    saved("gpt2", tmp_path, **({"max_shard_size": "20KB"} if shards else {}))
    file = sorted(tmp_path.glob("model*.safetensors"))[-1]
    content = file.read_bytes()
    damaged = {"truncated": content[:-1], "header": content[:20], "no safetensors at all": b"version https://git-lfs"}
    file.write_bytes(damaged.get(kind, b""))
    with pytest.raises(
        ConfigurationError, match=f"^{file}: the file is damaged or incomplete: .*; copy or download it again$"
    ):
        loaded(tmp_path, "gpt2")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_git_lfs_pointers_are_named(name, tmp_path):
    saved("gpt2", tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / name).write_bytes(pointer)
    message = f"{tmp_path / name}: the file is a Git LFS pointer"
    assert [text.startswith(message) for _, text in model_folder("model.path", tmp_path)] == [True]
    with pytest.raises(ConfigurationError, match=message):
        folders.model_folder(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        weight_files(str(tmp_path)) if name.startswith("model") else load_pretrained_tokenizer(str(tmp_path), False)


def test_an_index_that_cannot_be_followed(tmp_path):
    saved("gpt2", tmp_path, max_shard_size="20KB")
    file, index = sorted(tmp_path.glob("model-*.safetensors"))[1], tmp_path / "model.safetensors.index.json"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(ConfigurationError, match=f"^{file}: No such file or directory"):
        loaded(tmp_path, "gpt2")
    file.write_bytes(sorted(tmp_path.glob("model-*.safetensors"))[0].read_bytes())
    with pytest.raises(ConfigurationError, match=f"^{file}: .* is missing, which model.*.json lists for this file"):
        loaded(tmp_path, "gpt2")
    file.write_bytes(content)
    index.write_text("{")
    with pytest.raises(ConfigurationError, match=f"^{index}: damaged: not JSON"):
        loaded(tmp_path, "gpt2")


def test_what_no_rule_sets_is_not_left_as_memory_had_it():
    """openai-gpt's projections are set where they are constructed."""
    made = recipe(Path("none"))
    fields = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
    made.model = Model(config={"model_type": "openai-gpt", **fields})
    with pytest.raises(ConfigurationError, match=r"does not initialize .*c_attn\.weight in that module's own rule"):
        load_weights(build_skeleton(made, 100), made, lambda name, full: None)


def test_a_module_above_sets_buffers_of_layers():
    config = round_trip_config("falcon_h1")
    config.ssm_multipliers = [1.0, 2.0, 3.0, 4.0, 5.0]
    made, tensors = recipe(Path("none")), {}
    made.model = Model(config=config.to_diff_dict() | {"model_type": "falcon_h1"})
    load_weights(build_skeleton(made, 100), made, tensors.__setitem__)
    theirs = {name: buffer for name, buffer in AutoModelForCausalLM.from_config(config).named_buffers()}
    own = {name for name in theirs if name.endswith("mup_vector")}
    assert len(own) == 2 and all(torch.equal(tensors[name], theirs[name]) for name in own)
    assert theirs[min(own)].unique().tolist() == config.ssm_multipliers
