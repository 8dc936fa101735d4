"""A recipe gives what differs from the defaults, is read at a glance, headed by what a reader wants to know first."""

from __future__ import annotations

from pathlib import Path

import pytest

from samecurve.config import loader
from samecurve.config.documents import Document, parse_yaml, read_document
from samecurve.config.schema import Recipe
from scripts.pages import recipe_reference

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
    assert 9 <= len(keys) <= 25


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_model_and_data_of_ones_own_replace_the_recipes(path):
    found = loader.read_recipe(str(path), ["model.path=org/model", f"data.path={__file__}"])
    assert found.document.problems == []
    assert (found.recipe.model.path, found.recipe.model.config) == ("org/model", None)
    assert found.recipe.tokenizer.vocabulary_size is None


def test_base_lists_each_key_with_its_default():
    """Without its comment signs the file is a recipe that says what an empty one means."""
    text = (ROOT / "recipes" / "base.yaml").read_text()
    assert text == recipe_reference.render_yaml(), (
        "run python -m scripts.pages.recipe_reference --yaml > recipes/base.yaml"
    )
    assert read_document(ROOT / "recipes" / "base.yaml").content == {}
    lines = [line.removeprefix("# ") for line in text.splitlines()[3:] if line.startswith("# ")]
    document = Document("base.yaml")
    content = parse_yaml("\n".join(lines), document)
    assert content and not document.problems
    assert Recipe.model_validate(content | {"output_dir": "runs/x"}) == Recipe(output_dir="runs/x")
