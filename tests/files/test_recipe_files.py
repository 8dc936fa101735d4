"""A recipe is a diff on base.yaml that one reads at a glance, headed by what a reader wants to know first."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from samecurve.config import loader
from samecurve.config.documents import merge_blocks, read_document
from samecurve.config.schema import Recipe
from samecurve.config.section import Section

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("base", "tiny")  # what recipes are based on
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in SHARED)


def test_all_recipes_are_here():
    assert len(RECIPES) >= 12
    assert all((ROOT / "recipes" / f"{name}.yaml").is_file() for name in SHARED)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_headed(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    header = lines[: lines.index("")]
    assert all(line.startswith("#") for line in header)
    for word in ("# Data: ", "# Launch: ", "# Loss"):
        assert any(line.startswith(word) for line in header), word
    keys = [line for line in lines if line and not line.startswith("#")]
    assert 10 <= len(keys) <= 25


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_model_and_data_of_ones_own_replace_the_recipes(path):
    found = loader.read_recipe(str(path), ["model.path=org/model", f"data.path={__file__}"])
    assert found.document.problems == []
    assert (found.recipe.model.path, found.recipe.model.config) == ("org/model", None)
    assert found.recipe.tokenizer.vocabulary_size is None


def keys_of(section: type[Section], prefix: str = "") -> set[str]:
    found = set()
    for key, field in section.model_fields.items():
        below = field.annotation
        is_section = isinstance(below, type) and issubclass(below, Section)
        found |= keys_of(below, f"{prefix}{key}.") if is_section else {prefix + key}
    return found


def keys_in(values: dict, prefix: str = "") -> set[str]:
    nested = [keys_in(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k} for k, v in values.items()]
    return set().union(*nested)


def test_the_base_names_all_keys_but_which_model_and_data():
    base = yaml.safe_load((ROOT / "recipes" / "base.yaml").read_text())
    assert keys_of(Recipe) - keys_in(base) == {"output_dir", "model.path", "model.config", "data.path"}


def test_the_base_has_the_schemas_defaults():
    base = read_document(ROOT / "recipes" / "base.yaml")
    own = {"output_dir": "runs/x", "model": {}, "data": {}}
    assert Recipe.model_validate(merge_blocks(own, base.content)) == Recipe.model_validate(own)
