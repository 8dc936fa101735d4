"""Tokenizers: loads a pretrained one by path, or trains a byte-level BPE on the recipe's training documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samecurve.config.documents import describe
from samecurve.data import sources
from samecurve.data.encoder import vocabulary_size
from samecurve.data.formats import read_text
from samecurve.data.token_store import reading, training_texts
from samecurve.errors import ConfigurationError, DataError
from samecurve.specs.data_names import CHATML
from samecurve.specs.tasks import TASKS
from samecurve.storage import trusted_code
from samecurve.storage.cache import NewEntry, build_once, cache_folder, digest
from samecurve.storage.checksums import folder_problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe

BEGIN_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
# ChatML, the chat template of tokenizers that samecurve trains, is also offered for base models, which have none.
# The model is trained on the text inside `generation`. ChatML itself has no tools: they are written between the tags of
# Hermes and Qwen, which inference servers parse.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- set system = tools and messages and messages[0]['role'] == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0]['content'] + '\\n\\n' if system else '') }}
{{- 'Functions that can be called:\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '</tools>\\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if system else messages) %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first else '' }}
{{- '<tool_call>\\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BEGIN_OF_TEXT, END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
MASK = "<|mask|>"  # for mlm
# Part of the cache key: raise it when training on the same documents gives another tokenizer.
_VERSION = 5
_FILE = "tokenizer.json"


def load_tokenizer(recipe: Recipe, find: Callable[[Data], sources.DataSource] | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `tokenizer.path` or of `model.path`, or train one of `tokenizer.vocabulary_size`.

    Args:
        find: returns the source to train a tokenizer on. Default: plain documents.

    Raises:
        ConfigurationError: when the tokenizer's files are missing, or `tokenizer.pad_token` is not one of its tokens.
        DataError: when there is nothing to train a tokenizer on, or an adapter would have to train new tokens.
    """
    path, size = recipe.tokenizer.path or recipe.model.path, recipe.tokenizer.vocabulary_size
    if size is not None:
        if find is None:
            data, selection = recipe.data, sources.Selection.of(recipe, recipe.data)
            assert data.path is not None  # the tasks that take a mixture give `find`
            source = sources.find_source(data.path, data.pattern, data.text_column, selection)
        else:
            source = find(recipe.data)
        tokenizer = _trained(recipe, source, size)
    elif path is None:
        raise ConfigurationError("no tokenizer: set tokenizer.path, or tokenizer.vocabulary_size to train one")
    else:
        revision = recipe.model.revision if path == recipe.model.path else None
        tokenizer = load_pretrained_tokenizer(path, recipe.model.trust_remote_code, revision)
    if recipe.tokenizer.chat_template == CHATML:
        new = apply_chatml(tokenizer)
        if new and recipe.adapter.name is not None:
            raise DataError(
                f"tokenizer.chat_template: {CHATML} adds {' and '.join(new)} to the tokens of "
                f"{recipe.tokenizer.path or recipe.model.path}, and an adapter does not train their rows of the "
                "embedding; train the whole model (adapter.name=null), or set tokenizer.chat_template to a Jinja file "
                "whose turns end with a token that the model has, such as {{ eos_token }}"
            )
    elif recipe.tokenizer.chat_template is not None:
        tokenizer.chat_template = read_text(Path(recipe.tokenizer.chat_template))
    if recipe.tokenizer.pad_token is not None:
        token = recipe.tokenizer.pad_token
        if token not in tokenizer.get_vocab():  # a new one would have an id that the model's embedding does not hold
            special = ", ".join(dict.fromkeys(tokenizer.all_special_tokens)) or "none"
            raise ConfigurationError(
                f"tokenizer.pad_token: found {describe(token)}, which is not a token of "
                f"{tokenizer.name_or_path or 'the tokenizer'}; use one of its tokens (special ones: {special})"
            )
        tokenizer.pad_token = token
    return tokenizer


def padding(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Raises DataError if it has no padding token."""
    if tokenizer.pad_token_id is None:
        spare = [token.content for token in tokenizer.added_tokens_decoder.values()]
        named = next((token for token in spare if re.search("pad|reserved|unused|extra|unk", token.lower())), None)
        example = f"for example tokenizer.pad_token='{named}'" if named else "or its eos_token if no text ends with it"
        raise DataError(
            f"{tokenizer.name_or_path}: there is no pad_token; set tokenizer.pad_token to one of its tokens that "
            f"occurs in no text, also not at the end: {example}"
        )
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the ids of the special tokens, for the config of a from-scratch model."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}


def byte_lengths(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the bytes of text per token: (vocabulary,) int32, 0 for special tokens.

    The counts are exact for byte-level tokenizers (GPT-2, Llama 3, Qwen), whose alphabet has one character per byte.
    With SentencePiece, "<0x0A>" and the space marker count as one byte each, so a document counts up to one byte too
    many.
    """
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    # searched as text, because either may be nested in a Sequence, as in Llama 3's tokenizer
    byte_level = '"ByteLevel"' in json.dumps([description["pre_tokenizer"], description["decoder"]])
    lengths = np.zeros(vocabulary_size(tokenizer), dtype=np.int32)
    for token, index in tokenizer.get_vocab().items():
        if byte_level:
            lengths[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):
            lengths[index] = 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode())
    # added tokens are stored as text, not in the byte-level alphabet
    for index, added in tokenizer.added_tokens_decoder.items():
        lengths[index] = 0 if added.special else len(added.content.encode())
    return lengths


def load_pretrained_tokenizer(
    path: str, trust_remote_code: bool, revision: str | None = None
) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder or hub name. Raises ConfigurationError when its files are missing."""
    from transformers import AutoTokenizer

    # transformers would take a missing folder for a name on the hub
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigurationError(f"{path}: the tokenizer's folder does not exist; correct tokenizer.path or model.path")
    try:
        folder = str(Path(path).expanduser()) if path.startswith("~") else path
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, revision=revision or "main")
    except Exception as error:  # of any type, where a value in tokenizer_config.json is of another
        if problem := folder_problem(Path(path).expanduser()):
            raise ConfigurationError(problem) from error
        if trusted_code.is_refusal(error):
            raise ConfigurationError(trusted_code.refusal(path)) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"{path}: no tokenizer could be loaded ({reason}); a folder needs tokenizer.json and "
            "tokenizer_config.json, a hub name needs the network or an earlier download"
        ) from error


def _trained(recipe: Recipe, source: sources.DataSource, size: int) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    fraction = sources.validation_fraction(recipe)
    cache, chat = cache_folder(recipe.data.cache_dir), TASKS[recipe.task].chats
    more = (BEGIN_OF_TURN, END_OF_TURN) if chat else (MASK,) if TASKS[recipe.task].fills_masks else ()
    markers = (BEGIN_OF_TEXT, END_OF_TEXT, *more)
    # the first two markers are the same in every tokenizer that is trained here
    key = digest(_VERSION, sources.fingerprint(source, cache), source.identity, fraction, size, *markers[2:])

    def build(entry: NewEntry) -> None:
        entry.write(_FILE, train_tokenizer(source, fraction, size, markers).to_str(pretty=True).encode())

    file = build_once(cache / "tokenizers" / key, build, lambda entry: entry.path(_FILE))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        bos_token=BEGIN_OF_TEXT,
        eos_token=END_OF_TURN if chat else END_OF_TEXT,  # where generation stops
        pad_token=END_OF_TEXT,
        # for the exported tokenizer: transformers 4 would remove spaces before punctuation when it decodes
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    if TASKS[recipe.task].fills_masks:
        tokenizer.mask_token = MASK
    return tokenizer


def train_tokenizer(
    source: sources.DataSource,
    validation_fraction: float,
    vocabulary_size: int,
    special_tokens: Sequence[str] = (BEGIN_OF_TEXT, END_OF_TEXT),
) -> Tokenizer:
    """Train a byte-level BPE of `vocabulary_size` tokens, special ones included, on the documents not held out.

    Raises DataError as `source.check` and `source.documents` do.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    source.check()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that no text has an unknown token
        show_progress=False,
    )
    with reading("training a tokenizer on", source, "texts") as advance:
        texts = training_texts(source, validation_fraction)
        tokenizer.train_from_iterator((advance([text]) or text for text in texts), trainer)
    # For users of the exported tokenizer: a prompt begins with the same token as every training document.
    begin = (BEGIN_OF_TEXT, tokenizer.token_to_id(BEGIN_OF_TEXT))
    end = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    pair = f"{BEGIN_OF_TEXT} $A {END_OF_TEXT} $B:1"
    tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN_OF_TEXT} $A", pair, special_tokens=[begin, end])
    return tokenizer


def apply_chatml(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Set the ChatML template, add its two tokens if they are missing, and make END_OF_TURN the end-of-text token.

    Returns the tokens that the vocabulary lacked. They take the ids after the last one; `models.hf_config` checks that
    the model's embedding has rows for them.
    """
    from transformers import AddedToken

    known, vocabulary = tokenizer.added_tokens_decoder.values(), tokenizer.get_vocab()
    # in the vocabulary is not enough: the encoder finds the end of a turn by its special tokens
    special = {token.content for token in known if token.special}
    missing = [token for token in (BEGIN_OF_TURN, END_OF_TURN) if token not in special]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing], special_tokens=True)
    tokenizer.eos_token = END_OF_TURN
    tokenizer.chat_template = CHAT_TEMPLATE
    return [token for token in missing if token not in vocabulary]
