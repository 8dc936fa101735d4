"""Files of an export beside its weights: what the configs say of it, and its tokenizer."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from samecurve.data.chat_encoder import end_tokens
from samecurve.specs.data_names import is_hub_name
from samecurve.storage.filesystem import is_own_file

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Config keys of several families for the number of layers that predict further tokens.
FURTHER_TOKENS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)


def settle_config(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    kept: Iterable[str] = (),
) -> None:
    """Make a config say what the export holds.

    The end of text is the tokenizer's, as transformers' Trainer sets it (align_special_tokens). Layers that predict
    further tokens are only claimed if the model or the `kept` tensors have them: servers would look for their weights.
    """
    beyond = f".layers.{getattr(config, 'num_hidden_layers', '')}."
    names = (*kept, *(name for name, _ in model.named_parameters()))
    if not any("mtp" in name or beyond in name for name in names):
        for key in FURTHER_TOKENS:
            if getattr(config, key, None):
                setattr(config, key, 0)
    if not model.can_generate():
        return
    stored, end = getattr(config, "eos_token_id", None), tokenizer.eos_token_id
    if isinstance(stored, list) and end is not None and end not in stored:
        config.eos_token_id = [end, *stored]
    elif not isinstance(stored, list) and end is not None:
        config.eos_token_id = end


def write_generation_config(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write generation_config.json: `generation`, which also stops at the tokenizer's end of text and of a turn.

    Everything else is kept as it is, even what save_pretrained refuses, such as a temperature without do_sample.
    """
    written = copy.deepcopy(generation)
    ends = end_tokens(tokenizer, written.eos_token_id)
    written.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    written._from_model_config = False  # transformers may make such a one anew from config.json
    if written.use_cache is False:  # made from the config of the training, which has no cache
        written.use_cache = True
    directory.mkdir(parents=True, exist_ok=True)
    written.to_json_file(directory / GENERATION_CONFIG_NAME)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the tokenizer with SentencePiece's file, which llama.cpp's converter reads for some families.

    The file is that of the tokenizer's folder, here or in the hub's cache, if the tokenizer there has the same tokens.
    """
    tokenizer.save_pretrained(directory)
    name, files = tokenizer.name_or_path, ("tokenizer.json", "tokenizer.model")
    cached = is_hub_name(name)
    paths = [Path(try_to_load_from_cache(name, file) or "") if cached else Path(name, file) for file in files]
    if not name or not all(map(is_own_file, paths)):
        return
    if Tokenizer.from_file(str(paths[0])).get_vocab() == tokenizer.get_vocab():
        shutil.copyfile(paths[1], directory / paths[1].name)
