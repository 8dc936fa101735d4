"""The chat templates of three families, each with a tokenizer of bytes and the family's special tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
# name: (template, begin of text, end of text, what pads, other special tokens, what ends a turn)
FAMILIES = {
    "chatml": (CHATML, None, "<|im_end|>", "<|endoftext|>", ["<|im_start|>"], "<|im_end|>"),
    "llama3": (
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|finetune_right_pad_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, "<bos>", "<eos>", "<pad>", ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
}
END_OF_TURN = {name: family[-1] for name, family in FAMILIES.items()}
_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    template, begin, end, pad, others, _ = FAMILIES[name]
    return tokenizer_of(template, begin, end, pad, *others)


def tokenizer_of(template: str, begin: str | None, end: str, pad: str, *others: str) -> PreTrainedTokenizerFast:
    """Every byte is a token, two line breaks in a row are one, and so is each special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(token for token in (begin, end, pad, *others) if token))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def save_models(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A policy, a reference and a model that scores, whose weights are drawn at random."""
    import torch

    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), initializer_range=0.3, **_SIZES)
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scores")
