"""GGUF: every family and kind of tokenizer, read back by transformers; what no file can state is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from test_model_card import facts, written
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping

from samecurve.cli import commands
from samecurve.data import time_limit
from samecurve.errors import ConfigurationError, NumericError
from samecurve.export import gguf_file, gguf_tokenizer

SPLITS = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})
pytestmark = pytest.mark.skipif(not SPLITS, reason="transformers up to 5.17 does not know llama.cpp's splits")
TEXT = [*gguf_tokenizer.PROBES, "1234567 2024 " * 50, Path(__file__).read_text(encoding="utf-8")]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_parameters": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True}
PHI3 = {"original_max_position_embeddings": 128, "sliding_window": None}
CASES = {
    "llama": ("llama", "gpt-2", {}),
    "llama3": ("llama", "llama-bpe", LLAMA3),
    "biases": ("llama", "sentencepiece", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "linear": ("llama", "smollm", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "mistral": ("mistral", "tekken", {"head_dim": 32, "sliding_window": 64}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "o200k": ("llama", "gpt-4o", {}),
    "yarn": ("qwen2", "qwen2", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    "qwen3": ("qwen3", "qwen35", {"head_dim": 32}),
    "gemma2": ("gemma2", "gemma", GEMMA),
    "gemma3": ("gemma3_text", "gemma", {**GEMMA, "num_hidden_layers": 6}),
    "phi3": ("phi3", "sentencepiece", PHI3),
}
ALONE = ("llama", "mistral", "qwen2", "phi3")  # of which transformers reads the whole config


def byte_level(pre: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    stages = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))]
    if pre == "smollm":
        stages.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre != "gpt-2":
        stages.insert(0, pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", additional_special_tokens=special[1:]
    )
    made.chat_template = CHATML
    return made


def sentencepiece(prefix: bool) -> PreTrainedTokenizerFast:
    """Like Llama 2's, with a space before each text, or Gemma's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")  # for the training alone
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(TEXT[:5], trainers.BpeTrainer(vocab_size=500, special_tokens=pieces))
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = stored["added_tokens"][: len(special)]
    stored["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def model_folder(case: str, folder: Path, **changes) -> Path:
    family, kind, fields = CASES[case]
    spaces = {"sentencepiece": True, "gemma": False}
    tokenizer = sentencepiece(spaces[kind]) if kind in spaces else byte_level(kind)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer) + 8}  # a padded embedding
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | size | ends | fields | changes))
    for parameter in model.parameters():
        parameter.data.normal_(0.5 if parameter.dim() == 1 else 0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path, **options) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model(torch.arange(100, 140)[None]).logits


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_same_model(case, tmp_path):
    source = model_folder(case, tmp_path / "model")
    rounding, checked = gguf_file.write_gguf(source, tmp_path / "x.gguf", "fp32", "x")
    assert rounding == "" and "give the same tokens" in checked
    fields = GGUFReader(tmp_path / "x.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == (
        "default" if CASES[case][1] in ("sentencepiece", "gemma") else CASES[case][1]
    )
    if case in ALONE:
        torch.testing.assert_close(logits(tmp_path, gguf_file="x.gguf"), logits(source), rtol=1e-5, atol=1e-4)


def test_added_tokens_without_a_row_are_left_out(tmp_path):
    """Gemma 3 1B's tokenizer has the token of an image, for which its embedding has no row."""
    source = model_folder("gemma3", tmp_path / "model", vocab_size=500)
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert len(tokenizer) == 500
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(source)
    gguf_file.write_gguf(source, tmp_path / "x.gguf", "fp32", "x")
    tokens = GGUFReader(tmp_path / "x.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 500 and "<image>" not in tokens
    table, problem = gguf_tokenizer.token_table(tokenizer, 499)
    assert table is None and problem == "tokenizer: found 500 tokens, but the embedding has 499 rows"


@pytest.mark.parametrize("case", ["mistral", "phi3"])
def test_the_context_ends_at_a_window_that_the_file_cannot_state(case, tmp_path):
    """llama.cpp computes full attention for these families."""
    source = model_folder(case, tmp_path / "model", sliding_window=64)
    gguf_file.write_gguf(source, tmp_path / "x.gguf", "fp32", "x")
    fields = GGUFReader(tmp_path / "x.gguf").fields
    arch = fields["general.architecture"].contents()
    assert fields[f"{arch}.context_length"].contents() == 64
    assert "PARAMETER num_ctx 64\n" in gguf_tokenizer.modelfile("x.gguf", source)


@pytest.mark.parametrize("precision, cost", [("bf16", 2**-8), ("fp16", 1), ("q8_0", 1)])
def test_rounding_is_told(precision, cost, tmp_path):
    source = model_folder("llama", tmp_path / "model")
    rounding, _ = gguf_file.write_gguf(source, tmp_path / "x.gguf", precision, "x")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "x.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == gguf_file.GGUF_TYPES[precision] and types["output_norm.weight"] == "F32"
    largest = float(rounding.split("by ")[-1].split("%")[0]) / 100
    assert 0 < largest <= cost and f"rounding to {precision}" in rounding


@pytest.mark.parametrize("case, change", [("llama", {"rotary_pairs": False}), ("gemma2", {"norm_offset": 0.0})])
def test_a_wrong_form_is_found(case, change, tmp_path, monkeypatch):
    source = model_folder(case, tmp_path / "model")
    monkeypatch.setitem(gguf_file.FAMILIES, case, gguf_file.FAMILIES[case]._replace(**change))
    with pytest.raises(NumericError, match="its logits differ"):
        gguf_file.write_gguf(source, tmp_path / "x.gguf", "fp32", "x")


def test_wrong_splits_are_found(tmp_path, monkeypatch):
    source = model_folder("llama3", tmp_path / "model")
    monkeypatch.setattr(gguf_tokenizer, "_pre", lambda *_: "qwen2")
    with pytest.raises(NumericError, match="year 2024"):
        gguf_file.write_gguf(source, tmp_path / "x.gguf", "fp32", "x")


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("llama", {"hidden_act": "gelu"}, "activation: found gelu; llama.cpp computes silu"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar: found 64"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "layer_types: found"),
        ("qwen2", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, "rope_type: found dynamic"),
        ("qwen3", {"attention_bias": True}, "attention_bias: found true"),
    ],
)
def test_what_no_file_can_state_is_refused(case, changes, message, tmp_path):
    source = model_folder(case, tmp_path / "model", **changes)
    with pytest.raises(ConfigurationError, match="convert_hf_to_gguf.py") as error:
        gguf_file.write_gguf(source, tmp_path / "x.gguf", "fp32", "x")
    assert message in str(error.value) and not (tmp_path / "x.gguf").exists()


QWEN = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
TEMPLATE = """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system
{{ .Content }}<|im_end|>
{{ else if eq .Role "user" }}<|im_start|>user
{{ .Content }}<|im_end|>
{{ else if eq .Role "assistant" }}<|im_start|>assistant
{{ .Content }}<|im_end|>
{{ end }}{{ end }}<|im_start|>assistant
"""
DEFAULT = "{{ if not .System }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}"
COUNTED = "{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}"

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "chat, expected", [(CHATML, TEMPLATE), (QWEN, DEFAULT + TEMPLATE), (COUNTED, None), (ENDLESS, None)]
)
def test_chat_template_in_go(chat, expected, monkeypatch):
    monkeypatch.setattr(time_limit, "RENDER_SECONDS", 0.5)
    tokenizer = byte_level("gpt-2")
    tokenizer.chat_template = chat
    assert gguf_tokenizer.go_template(tokenizer) == expected


def test_the_command_writes_a_folder(tmp_path, capsys):
    run = tmp_path / "my run"
    written(run, facts(output_dir="runs/my run"))
    model_folder("qwen2", run / "model")
    command = ["export", str(run), "--format", "gguf", "--dtype", "bf16"]
    assert commands.main(command) == 0
    assert "rounding to bf16 changes a weight by" in capsys.readouterr().out
    folder = run / "model-gguf-bf16"
    names = {"my run-bf16.gguf", "Modelfile", "README.md", "SHA256SUMS"}
    assert {path.name for path in folder.iterdir()} == names
    modelfile = (folder / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./my run-bf16.gguf\nTEMPLATE") and "num_ctx 128\n" in modelfile
    assert 'PARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n' in modelfile
    card = (folder / "README.md").read_text()
    assert "ollama create my-run -f Modelfile" in card and "| stored weights | rounding to bf16" in card
    reader = GGUFReader(folder / "my run-bf16.gguf")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert reader.fields["tokenizer.chat_template"].contents() == CHATML
    stops = [reader.fields[f"tokenizer.ggml.{kind}_token_id"].contents() for kind in ("eos", "eot")]
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|endoftext|>", "<|im_end|>"]
    assert commands.main(command) == 7 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--dtype", "q8_0"], "--dtype q8_0: only for --format gguf"),
        (["--format", "gguf"], "has an adapter, which is no whole model; run python -m samecurve merge"),
        (["--public"], "--public: only with --push OWNER/NAME"),
        (["--push", "name", "--dry_run"], "--push: found name, expected OWNER/NAME"),
    ],
)
def test_mistakes_in_the_command(words, message, tmp_path, capsys):
    written(tmp_path, facts())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert commands.main(["export", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_package(tmp_path, capsys, monkeypatch):
    written(tmp_path, facts())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert commands.main(["export", str(tmp_path), "--format", "gguf"]) == 2
    assert "--format gguf: needs the gguf package; pip install gguf" in capsys.readouterr().err
