"""Where a run's exported model lies, and what its files say of it: all that can be told without torch."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from samecurve.config.renamed_keys import in_new_names
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import read_json

ADAPTER_CONFIG = "adapter_config.json"


def model_folder(run: Path) -> Path:
    """Raises ConfigurationError when neither RUN/model nor RUN holds a model or an adapter."""
    for folder in (run / "model", run):
        if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return folder
    if any((run / "checkpoints").glob("step_*")):
        raise ConfigurationError(
            f"{run} holds checkpoints and no exported model; let the run end with export.enabled: true, or export its "
            f"newest checkpoint: python -m samecurve export {run}"
        )
    raise ConfigurationError(
        f"neither {run / 'model'} nor {run} holds an exported model (config.json or {ADAPTER_CONFIG})"
    )


def run_directory(path: Path) -> Path | None:
    """Where run.json is, for a run directory and for a folder in one, such as RUN/model. None: no run is known."""
    return next((folder for folder in (path, path.absolute().parent) if (folder / "run.json").is_file()), None)


def recipe(run: Path) -> Recipe:
    """What run.json says was trained. Errors: see recipe_of."""
    return recipe_of(read_json(run / "run.json"), run / "run.json")


def recipe_of(facts: dict, file: Path) -> Recipe:
    """facts: the content of `file`. Raises ConfigurationError when no recipe of this version is in it."""
    facts = in_new_names(facts)
    if "recipe" not in facts:
        raise ConfigurationError(f"{file}: holds no recipe; give a run's output_dir")
    try:
        return Recipe.model_validate(facts["recipe"])
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        wrote = facts.get("versions", {}).get("samecurve") or "unknown"
        raise ConfigurationError(f"{file}: not a recipe of this version ({keys}); version {wrote} wrote it") from error


def trusts_remote_code(folder: Path) -> bool:
    """Whether the run that `folder` is of ran the model's own Python files (model.trust_remote_code).

    A folder alone, of which no run is known, is not trusted.
    """
    directory = run_directory(folder)
    facts = read_json(directory / "run.json") if directory else {}
    return bool(facts.get("recipe", {}).get("model", {}).get("trust_remote_code"))


def base_path(folder: Path) -> str | None:
    """Where the model is that an adapter's folder adapts; None for a whole model's.

    Raises ConfigurationError when it does not say, and for a folder that is gone.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: names no base_model_name_or_path ({error})") from error
    is_folder = base.startswith((".", "/", "~")) or base.count("/") > 1  # a hub name is OWNER/NAME
    if is_folder and not Path(base).is_dir():
        raise ConfigurationError(
            f"{path}: the model that it adapts is gone: no such folder: {base}; put it back, or change "
            "base_model_name_or_path there to where it lies now"
        )
    return base
