from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_export import tokenizer
from test_weights import FAMILIES, LLAMA
from test_weights import recipe as model_recipe
from tiny_families import run_layers
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.checkpoint import resume
from samecurve.cli import commands
from samecurve.config.schema import Adapter
from samecurve.errors import ConfigurationError
from samecurve.export.hf_export import ExportTarget, export
from samecurve.models.flops import token_flops
from samecurve.models.lora import is_adapted, is_adapter_weight, trained_shapes
from samecurve.models.pipeline_split import split_layers
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weight_files import fingerprint, header, weight_files
from samecurve.models.weights import load_weights

IDS = torch.arange(32).view(2, 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One pretrained folder per family, written by transformers."""
    found = {}
    for name, fields in FAMILIES.items():
        torch.manual_seed(1)
        given = {key: value for key, value in fields.items() if key != "model_type"}
        config = AutoConfig.for_model(fields["model_type"], vocab_size=64, **given)
        found[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def adapted_recipe(path, seed=0, **fields) -> SimpleNamespace:
    made = model_recipe(path=str(path), seed=seed)
    made.adapter = Adapter(name="lora", **{"rank": 4, "alpha": 8, **fields})
    return made


def filled(made, names=None):
    """A model of the recipe on the CPU."""
    shape = build_skeleton(made, 64)
    model = construct(type(shape), shape.config, torch.device("cpu"), made.adapter)
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        load_weights(shape, made, lambda name, tensor: tensors[name].copy_(tensor), names)
    return model


def moved(model):
    """As after some training: B starts at zero, where a wrong scale or a wrong sign cannot be seen."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapter_starts_as_the_pretrained_model_and_only_it_is_trained(folders, family, variant):
    model = filled(adapted_recipe(folders[family], dora=variant == "dora")).eval()
    reference = AutoModelForCausalLM.from_pretrained(folders[family]).eval()
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, rtol=1e-5, atol=1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in trained if is_adapter_weight(name)} == trained_shapes(model).keys()
    assert len(trained) >= 2 * 4 * 2


def test_matrices_start_as_pefts(folders):
    """A of the same distribution, B zero, DoRA's magnitudes the same numbers."""
    ours = {name: p for name, p in filled(adapted_recipe(folders["gpt2"], dora=True)).named_parameters()}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=True, fan_in_fan_out=True)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folders["gpt2"]), config)
    theirs = {name.removeprefix("base_model.model."): p for name, p in peft.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < ours[name].abs().max() <= bound and 0.9 * bound < tensor.abs().max() <= bound
            assert ours[name].std().item() == pytest.approx(tensor.std().item(), rel=0.3)
        else:
            torch.testing.assert_close(ours[name], tensor)


def test_every_matrix_has_a_draw_of_its_own_that_asks_for_nothing_else(folders):
    made = adapted_recipe(folders["llama"])
    first = {name: p for name, p in filled(made).named_parameters() if ".lora_A." in name}
    assert len({p.flatten()[0].item() for p in first.values()}) == len(first)
    name = list(first)[-1]
    assert torch.equal(dict(filled(made, {name}).named_parameters())[name], first[name])
    other = dict(filled(adapted_recipe(folders["llama"], seed=1)).named_parameters())
    assert not torch.equal(other[name], first[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_a_pipeline_are_the_adapted_model(folders, family):
    model = moved(filled(adapted_recipe(folders[family])))
    layers = split_layers(model)
    positions = torch.arange(16).expand(2, 16)
    assert torch.equal(run_layers(layers, IDS, positions), model(IDS, position_ids=positions).logits)
    assert {name for layer in layers for name, _ in layer.named_weights()} == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("fields", [{}, {"rslora": True}, {"dora": True}], ids=str)
@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_peft_reads_the_export_and_merge_proves_itself(folders, family, fields, tmp_path, capsys, monkeypatch):
    base = folders[family].relative_to(tmp_path.parent)
    monkeypatch.chdir(tmp_path.parent)
    model = moved(filled(adapted_recipe(folders[family], **fields)))
    write(model, tmp_path / "model")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders[family]), tmp_path / "model").eval()
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-6)
    stored = loaded.peft_config["default"]
    assert (stored.r, stored.lora_alpha) == (4, 8) and stored.base_model_name_or_path == str(base)
    assert (stored.use_rslora, stored.use_dora) == ("rslora" in fields, "dora" in fields)
    monkeypatch.chdir("/")  # the base is looked for above the run, too
    assert commands.main(["merge", str(tmp_path)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    assert not is_adapted(merged) and sorted(path.name for path in tmp_path.iterdir()) == ["merged", "model"]
    assert commands.main(["merge", str(tmp_path)]) == 7  # never over a folder that is there
    assert "exists already" in capsys.readouterr().err


def write(model, folder) -> None:
    parameters = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    export(parameters, model, ExportTarget(folder, tokenizer()), True)


def test_a_wrong_merge_is_not_kept(folders, tmp_path, monkeypatch, capsys):
    write(moved(filled(adapted_recipe(folders["llama"]))), tmp_path / "model")
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self, **_: self.unload(), raising=False)
    assert commands.main(["merge", str(tmp_path)]) == 5
    assert "and was deleted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_merge_copies_what_the_class_does_not_have(folders, tmp_path):
    shutil.copytree(folders["llama"], tmp_path / "base")
    write(moved(filled(adapted_recipe(tmp_path / "base"))), tmp_path / "run" / "model")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    save_file({**stored, "mtp.a": torch.rand(9).half()}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    assert commands.main(["merge", str(tmp_path / "run")]) == 0
    files = weight_files(str(tmp_path / "run" / "merged"))
    assert files.keys() == {*stored, "mtp.a"} and files["mtp.a"].dtype == "F16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged")


def test_what_cannot_be_merged(folders, tmp_path, capsys):
    assert commands.main(["merge", str(folders["llama"])]) == 2
    assert "nothing to merge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "target", "text"),
    [
        ("llama", ("q_proj", "w_proj"), "no layer of this llama is called w_proj; it has down_proj, gate_proj, k_proj"),
        ("llama", r".*nothing", "found '.*nothing'"),
        ("llama", ("embed_tokens",), "model.embed_tokens is an embedding"),
        ("llama_tied", ("lm_head", "q_proj"), "lm_head is tied to the token embedding"),
    ],
)
def test_targets_that_are_not_there(folders, family, target, text):
    with pytest.raises(ConfigurationError) as caught:
        build_skeleton(adapted_recipe(folders[family], target_modules=target), 64)
    assert text in str(caught.value)


def test_targets_by_name_and_by_pattern(folders):
    by_name = trained_shapes(build_skeleton(adapted_recipe(folders["llama"], target_modules=("q_proj",)), 64))
    pattern = r"model\.layers\.1\..*(q|v)_proj"
    by_pattern = trained_shapes(build_skeleton(adapted_recipe(folders["llama"], target_modules=pattern), 64))
    assert {name.split(".")[2:5:2] == ["0", "q_proj"] or ".1." in name for name in by_name} == {True}
    assert len(by_name) == len(by_pattern) == 4
    assert all(name.startswith("model.layers.1.self_attn.") for name in by_pattern)


def test_the_fingerprint_is_of_the_weights_and_not_of_their_files(folders, tmp_path):
    files = weight_files(str(folders["llama"]))
    weights = load_file(folders["llama"] / "model.safetensors")
    names, cut_up = sorted(weights), {}
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, tmp_path / f"{index}.safetensors")
        cut_up |= header(tmp_path / f"{index}.safetensors")
    assert fingerprint(cut_up) == fingerprint(files)
    for row in (0, -1):  # the last ones of an embedding are of new tokens, and may be all that was trained
        changed = {name: weight.clone() for name, weight in weights.items()}
        changed["model.embed_tokens.weight"][row] += 1.0
        save_file(changed, tmp_path / "changed.safetensors")
        assert fingerprint(header(tmp_path / "changed.safetensors")) != fingerprint(files)


def test_flops_leave_out_the_gradients_of_frozen_weights(folders):
    """By hand: 2 layers of 4 frozen matrices, q and o 32 x 32, k and v 32 x 16, gate, up and down 32 x 64, and the
    head 32 x 64; norms 5 x 32; rank 4 on all but the head."""
    frozen = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 64 + 5 * 32
    trained = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    attention = 12 * 2 * 32 * 16
    flops = token_flops(build_skeleton(adapted_recipe(folders["llama"]), 64), 16, recompute=False)
    assert flops.model == 4 * frozen + 6 * trained + attention
    whole = token_flops(
        build_skeleton(model_recipe(LLAMA), 64, {"bos_token_id": 0, "eos_token_id": 1}), 16, recompute=False
    )
    assert whole.model == 6 * frozen + attention


def test_a_checkpoint_is_of_one_adapter_and_one_base():
    facts = {"recipe": {"steps": 9}, "model": {}, "data": {}, "step": 1}
    saved = facts | {"adapter": {"rank": 4, "base_model": "a"}}
    assert resume.refusals(saved, saved) == []
    now = facts | {"adapter": {"rank": 8, "base_model": "b"}}
    now["recipe"] = {"steps": 9, "model": {"path": "org/b"}}
    base = "model.path: the weights of org/b are not those that the adapter of the checkpoint belongs to"
    assert resume.refusals(saved, now) == [base, "adapter.rank: 4 -> 8"]
    assert resume.refusals(facts, facts | {"adapter": None}) == []
    assert resume.refusals(facts, saved) != []
