"""Reads what is to be trained: a recipe, or a model without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samecurve.config import loader
from samecurve.config.documents import Document, format_problems, merge_blocks, read_document
from samecurve.config.overrides import apply_override
from samecurve.config.schema_data import SMALLEST_VOCABULARY
from samecurve.config.source import RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.planner import model_config
from samecurve.planner.coverage import refuse
from samecurve.planner.wanted import Wanted
from samecurve.specs.tasks import TASKS

SEARCHED = {
    "micro_batch": ("batch", "micro_batch_size"),
    "checkpointing": ("memory", "activation_checkpointing"),
}
DEFAULT_BATCH = {"global_batch_size": 256, "micro_batch_size": 1, "sequence_length": 4096}


def is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def read(name: str, overrides: Sequence[str]) -> Wanted:
    """Read a recipe, or a model's config.json, its folder or a hub name in the local cache.

    What the overrides set is fixed; other memory settings are for the search to choose. No data are needed.

    Raises:
        ConfigurationError: with every problem found.
    """
    if is_recipe(name):
        source = _recipe(name, overrides)
        assert source.recipe is not None
        model = source.recipe.model
        described = f"{name}: model.{'config' if model.config else f'path {model.path}'}"
        fields = model.config or model_config.read(str(model.path), f"{described}: ")
    else:
        fields, described = model_config.read(name), name
        source = _bare(name, fields, overrides)
    recipe = source.recipe
    assert recipe is not None
    typed = source.document.typed
    # a block that is given whole on the command line fixes its keys, too
    blocks = {(block,) for block, _ in SEARCHED.values()} & typed.keys()
    fixed = frozenset(name for name, path in SEARCHED.items() if path in typed or path[:1] in blocks)
    return Wanted.of_recipe(source, fields, described, recipe.tokenizer.vocabulary_size, fixed)


def data_elsewhere(source: RecipeSource) -> set[str]:
    """Return the keys of data that are not here: they may lie on the machines that are planned for."""
    keys = {each.key for each in source.document.problems} & {"data.path", "evaluate.path"}
    return keys if source.recipe else set()


def _recipe(name: str, overrides: Sequence[str]) -> RecipeSource:
    source = loader.read_recipe(name, overrides)
    elsewhere = data_elsewhere(source)
    problems = [each for each in source.document.problems if each.key not in elsewhere]
    if problems:
        raise ConfigurationError(format_problems(problems))
    assert source.recipe is not None
    refuse(source.recipe, source.document)
    return source


def bare_recipe(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what a recipe for a model without one says.

    A folder or hub name has weights and a tokenizer; a config.json is trained from scratch, with a tokenizer of its
    vocabulary.
    """
    from_scratch = name.endswith(".json")
    vocabulary = {"tokenizer": {"vocabulary_size": fields.get("vocab_size")}} if from_scratch else {}
    return {
        "output_dir": f"runs/{Path(name).stem}",
        "model": {"config": fields} if from_scratch else {"path": name},
        "batch": DEFAULT_BATCH,
        **vocabulary,
    }


def _bare(name: str, fields: dict[str, Any], overrides: Sequence[str]) -> RecipeSource:
    document = Document(name)
    # a recipe needs data, and Python's own library is on every machine
    data = {"data": {"path": TASKS["pretrain"].builtin}}
    document.content = merge_blocks(document.content, merge_blocks(bare_recipe(name, fields), data))
    for override in overrides:
        apply_override(document, override)
    if name.endswith(".json") and not document.typed.keys() & {("tokenizer",), ("tokenizer", "vocabulary_size")}:
        _check_vocabulary(name)
    recipe = loader.validate_recipe(document)
    refuse(recipe, document)
    return RecipeSource(document, recipe, frozenset())


def _check_vocabulary(name: str) -> None:
    """Raise ConfigurationError for a config.json with fewer tokens than a trained tokenizer can have."""
    config = read_document(name)
    block = ("text_config",) if config.get("text_config") else ()
    size = config.get(*block, "vocab_size")
    if isinstance(size, int) and size < SMALLEST_VOCABULARY:
        least = f"expected at least {SMALLEST_VOCABULARY}, the bytes and two tokens of a tokenizer that is trained"
        config.problem((*block, "vocab_size"), f"found {size}, {least}; give more tokens")
        raise ConfigurationError(format_problems(config.problems))
