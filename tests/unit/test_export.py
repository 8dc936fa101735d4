import json
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from samecurve.errors import CheckpointError, NumericError, StorageError
from samecurve.export.convert import copy_as
from samecurve.export.hf_export import ExportTarget, export
from samecurve.export.weight_shards import UNCHANGED, Shard, name_shards
from samecurve.models.weight_files import header, read, weight_files

LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 20,
}
MODELS = {
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama_untied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=False)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=32)),
}
RELOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert model.dtype == torch.float32 and model.config.use_cache
assert AutoTokenizer.from_pretrained(sys.argv[1]).eos_token == "<eos>"
torch.save(model(torch.arange(20)[None]).logits.detach(), sys.argv[2])
"""


def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<eos>")


def trained_and_skeleton(name):
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    trained = model_class(config).eval()
    with torch.device("meta"):
        skeleton = model_class(config)
    skeleton.config.use_cache = False
    return trained, skeleton


def weights(trained):
    return {name: parameter.detach() for name, parameter in trained.named_parameters()}


def export_to(directory, skeleton, tensors, shard_bytes=10**9):
    export(iter(tensors), skeleton, ExportTarget(directory, tokenizer(), shard_bytes=shard_bytes), True)


@pytest.mark.parametrize(
    "name", ["llama_tied", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "llama_untied"))]
)
def test_a_fresh_process_computes_the_same_logits(name, tmp_path):
    trained, skeleton = trained_and_skeleton(name)
    folder = tmp_path / "model"
    export_to(folder, skeleton, weights(trained).items(), shard_bytes=10**9 if name == "gpt2" else 4000)
    subprocess.run([sys.executable, "-c", RELOAD, str(folder), str(tmp_path / "logits")], check=True)
    expected = trained(torch.arange(20)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits"), expected)
    assert not skeleton.config.use_cache


def test_one_shard_has_no_index(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "adapter_config.json").write_text("of an export that was killed")
    export_to(tmp_path / "model", skeleton, weights(trained).items())
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in names and "model.safetensors.index.json" not in names
    assert "adapter_config.json" not in names
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == weights(trained).keys()
    assert "lm_head.weight" not in weights(trained)
    assert not (tmp_path / "model.partial").exists()


def test_shards_hold_every_tensor_once_within_the_limit(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_untied")
    limit = 4000
    export_to(tmp_path / "model", skeleton, weights(trained).items(), limit)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in (tmp_path / "model").glob("*.safetensors")}
    assert len(shards) > 2 and f"model-00001-of-{len(shards):05d}.safetensors" in shards
    assert {name: file for file, shard in shards.items() for name in shard} == index["weight_map"]
    assert index["weight_map"].keys() == weights(trained).keys()
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in weights(trained).values())
    assert all(sum(tensor.nbytes for tensor in shard.values()) <= limit for shard in shards.values())


def test_bf16_and_views_are_written_as_fp32(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    flat = torch.cat([tensor.flatten() for tensor in weights(trained).values()]).bfloat16()
    tensors, start = [], 0
    for name, tensor in weights(trained).items():
        tensors.append((name, flat[start : start + tensor.numel()].view(tensor.shape)))
        start += tensor.numel()
    export_to(tmp_path / "model", skeleton, tensors)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor.float()) for name, tensor in tensors)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


NORM = "model.norm.weight"
BROKEN = {
    "missing": (lambda w: w.pop(NORM), CheckpointError, f"missing parameters: {NORM}"),
    "unknown": (lambda w: w.update(extra=torch.ones(2)), CheckpointError, "extra: the model has no such parameter"),
    "empty": (lambda w: w.update({NORM: torch.ones(0)}), CheckpointError, f"{NORM}: empty"),
    "none": (lambda w: w.update({NORM: None}), CheckpointError, f"{NORM}: empty"),
    "shape": (
        lambda w: w.update({NORM: torch.ones(8)}),
        CheckpointError,
        f"{NORM}: found shape (8,), but the model has (16,)",
    ),
    "nan": (
        lambda w: w.update({NORM: torch.full((16,), float("nan"))}),
        NumericError,
        f"{NORM}: 16 values are not finite",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_tensor_is_an_error_and_not_a_file(case, tmp_path):
    change, error_class, message = BROKEN[case]
    trained, skeleton = trained_and_skeleton("llama_untied")
    tensors = weights(trained)
    change(tensors)
    with pytest.raises(error_class) as error:
        export_to(tmp_path / "model", skeleton, tensors.items(), shard_bytes=1000)
    assert str(error.value) == f"the model was not exported to model/:\n  {message}"
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_comes_twice(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    tensors = list(weights(trained).items())
    with pytest.raises(CheckpointError, match=f"{NORM}: given twice"):
        export_to(tmp_path / "model", skeleton, [*tensors, (NORM, torch.ones(16))])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_main", [True, False])
def test_every_rank_gathers_to_the_end(is_main, tmp_path):
    """Also rank 0 after a problem: the others wait in the next collective."""
    trained, skeleton = trained_and_skeleton("llama_tied")
    gathered = []

    def parameters():
        for name in weights(trained):
            gathered.append(name)
            yield name, None

    if is_main:
        with pytest.raises(CheckpointError):
            export(parameters(), skeleton, ExportTarget(tmp_path / "model", tokenizer()), True)
    else:
        export(parameters(), skeleton, ExportTarget(tmp_path / "model", tokenizer()), False)
    assert gathered == list(weights(trained))
    assert not list(tmp_path.iterdir())


def test_an_unwritable_place(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        export_to(tmp_path / "file" / "model", skeleton, weights(trained).items())


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    from samecurve.export import hf_export as module

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    trained, skeleton = trained_and_skeleton("llama_tied")
    with pytest.raises(StorageError, match="model.partial: No space left on device .*MiB are needed, .* MiB are free"):
        export_to(tmp_path / "model", skeleton, weights(trained).items(), shard_bytes=1000)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("")
    with pytest.raises(StorageError, match="exists already"):
        export_to(tmp_path / "model", skeleton, weights(trained).items())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["precious"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype(tmp_path, dtype):
    trained, skeleton = trained_and_skeleton("llama_tied")
    export(iter(weights(trained).items()), skeleton, ExportTarget(tmp_path / "model", tokenizer(), dtype=dtype), True)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor.to(dtype)) for name, tensor in weights(trained).items())
    assert LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype == dtype


def test_what_fp16_cannot_hold(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    tensors = weights(trained) | {NORM: torch.full((16,), 1e5)}
    with pytest.raises(
        NumericError, match=f"{NORM}: 16 values exceed the range of float16 .up to 100000.; choose bf16"
    ):
        export(
            iter(tensors.items()), skeleton, ExportTarget(tmp_path / "model", tokenizer(), dtype=torch.float16), True
        )
    export(iter(tensors.items()), skeleton, ExportTarget(tmp_path / "model", tokenizer(), dtype=torch.bfloat16), True)


def test_the_card_is_in_the_folder(tmp_path):
    trained, skeleton = trained_and_skeleton("llama_tied")
    parameters = iter(weights(trained).items())
    export(
        parameters,
        skeleton,
        ExportTarget(tmp_path / "model", tokenizer(), card=lambda folder: (folder / "x").touch()),
        True,
    )
    assert (tmp_path / "model" / "x").exists()


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_layers_that_are_not_exported_are_not_claimed(key, tmp_path):
    """Servers would look for the weights of layers that predict further tokens, which transformers leaves out."""
    trained, skeleton = trained_and_skeleton("llama_untied")
    setattr(skeleton.config, key, 1)
    export_to(tmp_path / "model", skeleton, weights(trained).items())
    assert json.loads((tmp_path / "model" / "config.json").read_text())[key] == 0


def test_the_generation_config_is_not_made_anew(tmp_path):
    """transformers may replace one that says so by one of config.json, without its further stop tokens."""
    trained, skeleton = trained_and_skeleton("llama_untied")
    assert skeleton.generation_config._from_model_config
    export_to(tmp_path / "model", skeleton, weights(trained).items())
    stored = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert not stored.get("_from_model_config") and stored["eos_token_id"] == [2, 0]


def test_kept_tensors_and_constants_are_bit_for_bit(tmp_path):
    """Through an export in bf16, and its conversion to fp32."""
    trained, skeleton = trained_and_skeleton("llama_tied")
    for model in (trained, skeleton):
        model.model.layers[0].register_buffer("layer_scalar", torch.tensor([1 + 2**-20], dtype=torch.float32))
    beside = {"mtp.a": torch.rand(300).to(torch.float8_e4m3fn), "mtp.b": torch.rand(100, 10), "mtp.c": torch.arange(5)}
    save_file(beside, tmp_path / "base.safetensors")
    kept = header(tmp_path / "base.safetensors")
    target = ExportTarget(tmp_path / "bf16", tokenizer(), shard_bytes=4000, dtype=torch.bfloat16, kept=lambda: kept)
    skeleton.config.num_nextn_predict_layers = 1
    export(
        iter([*weights(trained).items(), ("model.layers.0.layer_scalar", trained.model.layers[0].layer_scalar)]),
        skeleton,
        target,
        True,
    )
    copy_as(tmp_path / "bf16", tmp_path / "fp32", torch.float32)
    for folder in (tmp_path / "bf16", tmp_path / "fp32"):
        stored = weight_files(str(folder))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(entry.stop - entry.start for entry in stored.values())
        assert stored.keys() == {*weights(trained), "model.layers.0.layer_scalar", *beside}
        assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
        for name, tensor in (beside | {"model.layers.0.layer_scalar": trained.model.layers[0].layer_scalar}).items():
            found = read(stored, [name])[name]
            assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
        LlamaForCausalLM.from_pretrained(folder)
    save_file({NORM: torch.ones(1)}, tmp_path / "base.safetensors")
    clash = ExportTarget(tmp_path / "clash", tokenizer(), kept=lambda: header(tmp_path / "base.safetensors"))
    with pytest.raises(CheckpointError, match=f"{NORM}: the model has a weight of this name"):
        export(iter(weights(trained).items()), trained_and_skeleton("llama_tied")[1], clash, True)


def test_sentencepieces_file_is_copied_unless_tokens_were_added(tmp_path):
    """llama.cpp's converter reads tokenizer.model for Gemma and Phi-3."""
    tokenizer().save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "tokenizer.model").write_bytes(b"pieces")
    trained, skeleton = trained_and_skeleton("llama_tied")
    for name, tokens in (("same", []), ("grown", ["<new>"])):
        own = PreTrainedTokenizerFast.from_pretrained(tmp_path / "start")
        own.add_tokens(tokens)
        export(iter(weights(trained).items()), skeleton, ExportTarget(tmp_path / name, own), True)
    assert (tmp_path / "same" / "tokenizer.model").read_bytes() == b"pieces"
    assert not (tmp_path / "grown" / "tokenizer.model").exists()


def test_what_is_no_weight_is_not_rounded(tmp_path):
    (tmp_path / "in").mkdir()
    tensors = {"weight": torch.tensor([0.1234567]), "bias": torch.tensor([0.1234567]), "count": torch.tensor([70000])}
    shards = [
        Shard(tmp_path / "in" / "0", "model", ["weight", "count"]),
        Shard(tmp_path / "in" / "1", UNCHANGED, ["bias"]),
    ]
    for path, _, names in shards:
        save_file({name: tensors[name] for name in names}, path)
    name_shards(shards)
    copy_as(tmp_path / "in", tmp_path / "out", torch.bfloat16)
    found = read(weight_files(str(tmp_path / "out")), tensors)
    assert found["weight"].dtype == torch.bfloat16
    assert torch.equal(found["bias"], tensors["bias"]) and torch.equal(found["count"], tensors["count"])


def test_rounding_by_hand(tmp_path):
    """1 + 2^-9 lies in the middle between two numbers of bf16, and becomes the even one, 1; 0 does not count."""
    save_file({"a": torch.tensor([0.0, 1.0, 1 + 2**-9])}, tmp_path / "in.safetensors")
    (tmp_path / "in").mkdir()
    (tmp_path / "in.safetensors").rename(tmp_path / "in" / "model.safetensors")
    rounding = copy_as(tmp_path / "in", tmp_path / "out", torch.bfloat16)
    largest = 2**-9 / (1 + 2**-9)
    assert rounding.largest == pytest.approx(largest, rel=1e-6)
    assert rounding.total / rounding.num_weights == pytest.approx(largest / 2, rel=1e-6)
    assert rounding.text("bf16") == "rounding to bf16 changes a weight by 0.097% on average, by 0.195% at most"
    assert copy_as(tmp_path / "in", tmp_path / "same", torch.float32).text("fp32") == ""
