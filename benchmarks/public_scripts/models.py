"""Small models, with tokenizers, under the names that the scripts ask for."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from benchmarks.public_scripts.data import WORDS

BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
DECODER = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def tokenizer(special: dict[str, str]) -> PreTrainedTokenizerFast:
    """Of words. special: the tokens by their roles, of which BERT's stand around each text."""
    vocabulary = {word: index for index, word in enumerate([*special.values(), *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    inputs = ["input_ids", "attention_mask"]
    if special is BERT:
        around = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        words.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="[CLS] $A [SEP]", pair=pair, special_tokens=around
        )
        inputs.insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_input_names=inputs, model_max_length=512, padding_side="right", **special
    )


def write_models(folder: Path) -> None:
    """Models of 2 layers with random weights: BERT with dropout and without, GPT-2 and a Llama."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {
        "bert-base-cased": ("bert", heads, BERT),
        "bert-without-dropout": ("bert", heads | no_dropout, BERT),
        "gpt2": ("gpt2", {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 128}, DECODER),
        "llama": ("llama", heads, DECODER),
    }
    for name, (family, options, special) in sizes.items():
        text = tokenizer(special)
        ids = {
            f"{role}_id": text.convert_tokens_to_ids(token) for role, token in special.items() if role != "unk_token"
        }
        # larger than usual: the outputs of these small layers would hardly differ
        config: PreTrainedConfig = AutoConfig.for_model(
            family, vocab_size=len(text), initializer_range=0.2, **options, **ids
        )
        torch.manual_seed(0)
        made = AutoModelForPreTraining if family == "bert" else AutoModelForCausalLM
        made.from_config(config).save_pretrained(folder / name)
        text.save_pretrained(folder / name)
