from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from samecurve.config.schema import Adapter, Model, Optimizer, Tokenizer
from samecurve.data.datasets.streaming import StreamRows
from samecurve.errors import ConfigurationError, DataError
from samecurve.inference import loading
from samecurve.models import quantized
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weight_files import read, weight_files
from samecurve.models.weights import ModelDescription, describe, kept_tensors, load_weights
from samecurve.planner import model_shape
from samecurve.specs.heads import Head
from samecurve.tasks.task_skeleton import _highest_id, skeleton_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1}


def recipe(config=None, path=None, seed=0, attention="sdpa", sequence_length=16) -> SimpleNamespace:
    model = Model(config=config, path=path, attention=attention)
    batch = SimpleNamespace(sequence_length=sequence_length)
    return SimpleNamespace(
        model=model, tokenizer=Tokenizer(), adapter=Adapter(), optimizer=Optimizer(), seed=seed, batch=batch
    )


def filled(made, model=None, names=None) -> dict[str, torch.Tensor]:
    found = {}

    def write(name, tensor):
        assert name not in found, name
        found[name] = tensor.clone()

    load_weights(model or build_skeleton(made, 64, TOKENS), made, write, names)
    return found


@pytest.fixture(params=FAMILIES, ids=str)
def from_scratch(request) -> SimpleNamespace:
    return recipe(FAMILIES[request.param])


def test_skeleton_is_on_meta_and_tied_as_the_config_says(from_scratch):
    model = build_skeleton(from_scratch, 64, TOKENS)
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == model.config.tie_word_embeddings


def test_fill_covers_every_parameter_and_buffer_once(from_scratch):
    model = build_skeleton(from_scratch, 64, TOKENS)
    expected = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert filled(from_scratch, model).keys() == expected


def test_seeded_weights_have_the_familys_own_distribution_and_buffers(from_scratch):
    ours = filled(from_scratch)
    torch.manual_seed(0)  # transformers draws by the global generator, and some draws are far from the mean
    reference = AutoModelForCausalLM.from_config(build_skeleton(from_scratch, 64, TOKENS).config)
    for name, tensor in reference.named_parameters():
        assert ours[name].std() == pytest.approx(tensor.std().item(), rel=0.2, abs=1e-9), name
        assert ours[name].mean() == pytest.approx(tensor.mean().item(), abs=5e-3), name
    for name, tensor in reference.named_buffers():
        assert torch.equal(ours[name], tensor), name


def test_weights_do_not_depend_on_which_part_is_asked_for(from_scratch):
    whole = filled(from_scratch)
    part = {name for name in whole if ".1." in name}
    assert part
    for name, tensor in filled(from_scratch, names=part).items():
        assert torch.equal(tensor, whole[name]), name


def test_another_seed_gives_other_weights_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = filled(recipe(LLAMA))
    assert torch.equal(torch.rand(1), expected)
    second = filled(recipe(LLAMA, seed=1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(first[name], first["model.layers.1.mlp.up_proj.weight"])


@pytest.fixture
def saved(tmp_path):
    """A pretrained folder as transformers writes it, and its weights."""
    model = AutoModelForCausalLM.from_config(build_skeleton(recipe(FAMILIES["llama_tied"]), 64, TOKENS).config)
    model.save_pretrained(tmp_path)
    return tmp_path, dict(model.named_parameters())


def test_pretrained_weights_are_read_as_fp32(saved):
    folder, weights = saved
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(rounded, folder / "model.safetensors")
    found = filled(recipe(path=str(folder)))
    for name, tensor in weights.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.detach().bfloat16().float()), name


def test_pretrained_shards_are_found_through_the_index(saved):
    folder, weights = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    found = filled(recipe(path=str(folder)))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_of_the_base_model_has_no_prefix(tmp_path):
    model = AutoModelForCausalLM.from_config(build_skeleton(recipe(FAMILIES["gpt2"]), 64, TOKENS).config)
    model.transformer.save_pretrained(tmp_path)
    found = filled(recipe(path=str(tmp_path)))
    assert torch.equal(found["transformer.wte.weight"], model.transformer.wte.weight)


@pytest.mark.parametrize("how", ["longer", "shape", "dtype"])
def test_a_file_that_is_no_safetensors_file_is_named(how, saved):
    file = saved[0] / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    header[name] |= {"shape": {"shape": [3, 5, 7]}, "dtype": {"dtype": "X99"}}.get(how, {})
    encoded = json.dumps(header).encode()
    tail = b"\0" * 8 if how == "longer" else b""
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :] + tail)
    with pytest.raises(ConfigurationError, match="model.safetensors: the file is damaged or incomplete: "):
        stored = weight_files(str(file.parent))
        read(stored, [name])


def test_a_missing_tensor_and_a_wrong_shape_are_told_by_name(saved):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match="holds no tensor for model.norm.weight"):
        filled(recipe(path=str(folder)))
    save_file({**tensors, name: torch.ones(7)}, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"model.norm.weight has the shape \(7,\), the config needs \(32,\)"):
        filled(recipe(path=str(folder)))


MTP = {"mtp.layers.0.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2), "model.visual.a": torch.ones(2)}


def with_more(folder, tensors) -> SimpleNamespace:
    stored = load_file(folder / "model.safetensors")
    # from versions in which each layer had this buffer
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.bias": torch.ones(1, 1, 8, 8)}
    save_file({**stored, **old, **tensors}, folder / "model.safetensors")
    return recipe(path=str(folder))


COUNTED = "model.visual (1 tensor), mtp (2 tensors)"


@pytest.mark.parametrize("chosen", ["stop", "keep", "drop"])
@pytest.mark.parametrize("skipped", [False, True])  # by transformers itself
def test_unknown_tensors_stop_are_kept_or_dropped(chosen, skipped, saved, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", ["^mtp", "visual"] if skipped else None)
    made = with_more(saved[0], MTP)
    made.model = made.model.model_copy(update={"unknown_tensors": chosen})
    if chosen == "stop" and not skipped:
        with pytest.raises(ConfigurationError) as error:
            filled(made)
        assert f"LlamaForCausalLM does not have: {COUNTED}; they" in str(error.value)
        assert "set model.unknown_tensors to keep" in str(error.value)
        return
    assert filled(made).keys() == filled(recipe(FAMILIES["llama_tied"])).keys()
    model = build_skeleton(made, 64, TOKENS)
    described = describe(model, made)
    is_kept = chosen != "drop"
    assert (described.kept_tensors, described.unread_tensors) == ((COUNTED, "") if is_kept else ("", COUNTED))
    assert kept_tensors(model, made).keys() == (MTP.keys() if is_kept else set())


@pytest.mark.parametrize("head", ["sequence_classification", "embedding"])
def test_another_tasks_head_is_told(head, saved):
    made = with_more(saved[0], {"lm_head.weight": torch.ones(64, 32)})
    model = build_skeleton(made, 64, TOKENS, Head(head))
    assert describe(model, made).unread_tensors == "lm_head (1 tensor)"
    assert filled(made, model)
    with pytest.raises(ConfigurationError, match=r"does not have: model.visual \(1 tensor\)"):
        made = with_more(saved[0], {"model.visual.a": torch.ones(2)})
        filled(made, build_skeleton(made, 64, TOKENS, Head(head)))


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(wrong, saved):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = wrong
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=rf"model.safetensors: {name}: 1 of 2,048 values are NaN or infinite"):
        filled(recipe(path=str(folder)))
    assert filled(recipe(path=str(folder)), names={"model.norm.weight"})  # of another pipeline stage


def test_a_vocabulary_that_the_embedding_does_not_hold_is_refused():
    with pytest.raises(DataError, match="tokenizer has 100 ids, but the model's embedding holds 64"):
        build_skeleton(recipe({**LLAMA, "vocab_size": 64}), 100)


@pytest.mark.parametrize(("tokens", "padding", "fits"), [([1, 63], 0, True), ([1, 64], 0, False), ([1], 64, False)])
def test_added_tokens_without_a_row_of_the_embedding_may_not_be_in_the_data(tokens, padding, fits, tmp_path):
    """Gemma 3 1B's tokenizer has one for images, id 262144, and its embedding 262144 rows."""
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaConfig(**config, vocab_size=64).save_pretrained(tmp_path)
    rows = SimpleNamespace(stream=SimpleNamespace(tokens=np.array(tokens, np.uint16)), padding_token=padding)
    task = SimpleNamespace(vocabulary_size=65, train=rows, validation=None, special_tokens={}, head=Head("causal_lm"))
    if fits:
        assert skeleton_of(recipe(path=str(tmp_path)), task).config.vocab_size == 64
    else:
        with pytest.raises(DataError, match="tokenizer has 65 ids, but the model's embedding holds 64"):
            skeleton_of(recipe(path=str(tmp_path)), task)
    rows.stream.tokens = np.array([], np.uint16)  # nothing is held out
    assert (_highest_id(task) < 64) is (padding < 64)
    task.train = StreamRows.__new__(StreamRows)  # of which nobody knows the length
    assert _highest_id(task) == 64


def test_a_model_without_layers_to_quantize_is_refused():
    """GPT-2 has its weights in Conv1D."""
    made = recipe({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64})
    model = build_skeleton(made, 64).requires_grad_(False)
    made.adapter, made.precision = Adapter(name="lora", quantization="8bit"), "bf16"
    with pytest.raises(ConfigurationError, match="adapter.quantization: found 8bit, but .* has no torch.nn.Linear"):
        quantized.quantize_layers(model, made)


def test_a_foreign_tokenizer_is_named_where_a_model_has_its_own(tmp_path):
    LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"}, vocab_size=64).save_pretrained(
        tmp_path
    )
    made = recipe(path=str(tmp_path))
    with pytest.raises(DataError) as error:
        build_skeleton(made, 100)
    fix = f"the one in {tmp_path} does not belong to it; name the model's own as tokenizer.path"
    assert str(error.value).endswith(f"(vocab_size): {fix}")
    made.tokenizer = Tokenizer(path="other")
    with pytest.raises(DataError, match="other does not belong to it; leave tokenizer.path out"):
        build_skeleton(made, 100)


BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
XLNET = {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 4}
# name, the recipe's model, how the message begins
MISTAKES = [
    (
        "unknown key",
        recipe({**LLAMA, "num_hiden_layers": 5}),
        "model.config.num_hiden_layers: the config of llama has no such key; did you mean num_hidden_layers?",
    ),
    (
        "unknown keys, one of another family",
        recipe({**FAMILIES["gpt2"], "dropout_of_all": 5, "rope_theta": 1e4}),
        "model.config.dropout_of_all: the config of gpt2 has no such key; remove it\n"
        "model.config.rope_theta: the config of gpt2 has no such key",
    ),
    (
        "another key of the recipe",
        recipe({**LLAMA, "attn_implementation": "eager"}),
        "model.config.attn_implementation: the recipe's model.attention sets it; remove it",
    ),
    (
        "wrong type",
        recipe({**LLAMA, "num_hidden_layers": "two"}),
        "model.config: transformers refuses these fields for a llama (StrictDataclassFieldValidationError: Validation "
        "error for field 'num_hidden_layers': TypeError: Field 'num_hidden_layers' expected int, got str",
    ),
    (
        "values that do not fit",
        recipe({**LLAMA, "hidden_size": 30}),
        "model.config: transformers refuses these fields for a llama (StrictDataclassClassValidationError: ",
    ),
    ("no division", recipe({**LLAMA, "num_attention_heads": 0}), "model.config: transformers refuses these fields"),
    (
        "unknown activation",
        recipe({**LLAMA, "hidden_act": "sulu"}),
        "model: transformers cannot build this llama with model.attention sdpa (KeyError: 'sulu'); correct",
    ),
    (
        "too few positions by default",
        recipe(FAMILIES["gpt2"], sequence_length=65),
        "batch.sequence_length: found 65, but the model's max_position_embeddings is 64; use at most 64",
    ),
    (
        "dropout in a kernel that draws its own",
        recipe({**LLAMA, "attention_dropout": 0.1}, attention="flex_attention"),
        "model.attention: found flex_attention, but attention_dropout is 0.1",
    ),
    ("unknown family", recipe({"model_type": "lama"}), "model.config.model_type: transformers "),
    ("no such name on the hub", recipe(path="no/such"), "model.path: no model's config could be read from no/such (OS"),
    ("no causal class", recipe({"model_type": "t5"}), "model: t5 is not a causal language model of text alone"),
    ("more than text", recipe({"model_type": "gemma3"}), "model: gemma3 is not a causal language model of text alone"),
    ("an encoder", recipe(BERT), "model: every position of a bert sees the following tokens"),
    ("permutations", recipe(XLNET, attention="eager"), "model: every position of a xlnet sees the following tokens"),
]


@pytest.mark.parametrize(("made", "message"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_mistakes_in_the_model_are_told_by_key(made, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError) as error:
        build_skeleton(made, 64, TOKENS)
    assert str(error.value).startswith(message)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed here")
def test_an_attention_that_is_not_installed_is_told():
    with pytest.raises(ConfigurationError, match=r"model.attention flash_attention_2 \(ImportError: "):
        build_skeleton(recipe(LLAMA, attention="flash_attention_2"), 64, TOKENS)


@pytest.mark.parametrize("family", ["qwen3_moe", "cohere2", "qwen2", "olmoe"])
def test_a_key_that_only_the_code_reads_is_known(family):
    """transformers reads head_dim by getattr: it is no field of these families' configs."""
    model = build_skeleton(recipe({**LLAMA, "model_type": family, "head_dim": 16}), 64)
    assert model.get_submodule("model.layers.0.self_attn.q_proj").weight.shape == (4 * 16, 32)


# of a published config.json, beside the sizes
RECORDS = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    "cache_implementation": "hybrid",
    "max_window_layers": 28,
    "quantization_config": {"quant_method": "mxfp4"},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
}


def test_keys_of_published_configs_are_taken_and_told():
    made = recipe({**LLAMA, **RECORDS, "pretraining_tp": 1})
    model = build_skeleton(made, 64)
    assert describe(model, made).unread_keys == sorted(RECORDS)
    plain = build_skeleton(recipe(LLAMA), 64).config
    assert model.config.to_dict() == {**plain.to_dict(), "use_cache": False}


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("old", "new"), [({"rope_theta": 5e5}, {"rope_theta": 5e5}), ({"rope_scaling": LINEAR}, LINEAR)], ids=str
)
def test_older_spellings_that_the_family_translates_are_known(old, new):
    config = build_skeleton(recipe({**LLAMA, **old}), 64, TOKENS).config
    assert new.items() <= config.rope_parameters.items()


def test_the_recipes_own_fields_are_left_as_they_are():
    fields = {**LLAMA, "rope_parameters": {"rope_type": "default"}}
    build_skeleton(recipe(fields), 64, TOKENS)
    assert fields["rope_parameters"] == {"rope_type": "default"}


CAUSAL = {
    "bert as a decoder": {**BERT, "is_decoder": True},
    "bart's decoder": {"model_type": "bart", "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4},
    "gpt_neox": {**BERT, "model_type": "gpt_neox"},
}


@pytest.mark.parametrize("fields", CAUSAL.values(), ids=CAUSAL)
def test_what_passes_for_causal_is(fields):
    model = AutoModelForCausalLM.from_config(build_skeleton(recipe(fields), 64, TOKENS).config).eval()
    first = torch.arange(3, 11)[None]
    second = first.clone()
    second[0, -1] = 40
    difference = (model(input_ids=first).logits - model(input_ids=second).logits).abs().amax(-1)[0]
    assert difference[:-1].max() < 1e-6 < difference[-1]


def test_batch_norm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", lambda size, eps: torch.nn.BatchNorm1d(size, eps))
    with pytest.raises(ConfigurationError) as caught:
        build_skeleton(recipe(LLAMA), 64)
    assert "model.layers.0.input_layernorm of this llama is a BatchNorm1d" in str(caught.value)
    assert "running statistics would differ between ranks" in str(caught.value)


def test_dropout_is_told_by_name():
    assert describe(build_skeleton(recipe(LLAMA), 64, TOKENS), recipe(LLAMA)) == ModelDescription(
        model_type="llama", attention="sdpa", new_head=[], unread_keys=[]
    )
    gpt2 = recipe(FAMILIES["gpt2"])
    rates = describe(build_skeleton(gpt2, 64, TOKENS), gpt2).dropout
    assert {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}.items() <= rates.items()


def test_build_on_a_device_leaves_no_meta_tensor():
    made = construct(LlamaForCausalLM, build_skeleton(recipe(LLAMA), 64, TOKENS).config, torch.device("cpu"))
    assert not any(p.is_meta for p in made.parameters()) and json.dumps(made.config.use_cache) == "false"


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
def test_an_index_names_files_of_its_folder(name, tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "elsewhere.safetensors", folder / "sub" / "model.safetensors"):
        save_file({"w": torch.zeros(2)}, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ConfigurationError, match="which is not a file of this folder"):
        weight_files(str(folder))
    LlamaConfig(hidden_size=8, num_attention_heads=1, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    with pytest.raises(ConfigurationError, match="which is not a file of this folder"):
        loading.load_model(str(folder))  # as the commands do, where transformers reads the weights


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "model.safetensors"])
def test_brackets_without_end_are_a_damaged_file(file, tmp_path):
    text = b"[" * 100_000
    (tmp_path / file).write_bytes(text if file.endswith("json") else struct.pack("<Q", len(text)) + text)
    with pytest.raises(ConfigurationError, match="copy or download it again"):
        weight_files(str(tmp_path))


SIZES = {"hidden_size": "64", "num_attention_heads": 0, "vocab_size": 10**12, "num_hidden_layers": 10**7}
SIZES |= {
    "num_labels": 10**9,
    "num_local_experts": 10**9,
    "num_decoder_layers": 1e7,
    "hidden_dim": 1e12,
    "model_type": [1],
}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("read", ["training", "a command", "plan"])
def test_sizes_of_no_model_are_refused_before_it_is_built(key, read, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, key: SIZES[key]}))
    with pytest.raises(ConfigurationError, match=f"config.json: {key}: found .*, expected (a number of at|text)"):
        if read == "training":
            build_skeleton(recipe(path=str(tmp_path)), 64)
        elif read == "plan":
            model_shape.read(str(tmp_path))
        else:
            loading.stored_head(tmp_path)
