"""Folders of exported models and the facts in their files. Needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError

from samecurve.config.adapter_folder import ADAPTER_CONFIG
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.run.sessions import RUN_FACTS
from samecurve.storage import trusted_code
from samecurve.storage.checksums import check_checksums, folder_problem
from samecurve.storage.records import read_record


def model_folder(run: Path) -> Path:
    """Return the folder of the exported model or adapter: RUN/model or RUN.

    Raises ConfigurationError without one, and for Git LFS pointers; CheckpointError if SHA256SUMS shows damage.
    """
    for folder in (run / "model", run):
        if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            if problem := folder_problem(folder):
                raise ConfigurationError(problem)
            check_checksums(folder)
            return folder
    if any((run / "checkpoints").glob("step_*")):
        raise ConfigurationError(
            f"{run}: only checkpoints here, no exported model; export the newest one: python -m samecurve export {run}"
        )
    raise ConfigurationError(
        f"{run}: no exported model here or in {run / 'model'} (config.json or {ADAPTER_CONFIG}); give a run directory "
        "or the folder of a model or adapter"
    )


def run_directory(path: Path) -> Path | None:
    """Return the run directory of a path: the path or its parent, whichever holds a run.json. None without one."""
    return next((folder for folder in (path, path.absolute().parent) if (folder / "run.json").is_file()), None)


def read_recipe(run: Path) -> Recipe:
    """Read the recipe from run.json. Raises as `parse_recipe` does, and for a damaged file."""
    record = read_record(run / "run.json", RUN_FACTS)
    return parse_recipe(record.optional(ConfigurationError, "restore it from a copy"), record.path)


def known_recipe(path: Path) -> Recipe | None:
    """Return the recipe of the run that a model belongs to; None without a run. A damaged run.json is reported."""
    directory = run_directory(path)
    if directory is None:
        return None
    record = read_record(directory / "run.json", RUN_FACTS)
    if record.value is None:
        print(f"{record.path}: {record.problem}; the model is used without its recipe", file=sys.stderr)
        return None
    return parse_recipe(record.value, record.path)


def parse_recipe(facts: dict, file: Path) -> Recipe:
    """Parse the recipe in `facts`, the content of `file`, and leave out its model.trust_remote_code (`with_code`).

    Raises ConfigurationError without a valid recipe.
    """
    if "recipe" not in facts:
        raise ConfigurationError(f"{file}: no recipe found; give the output_dir of a run")
    try:
        recipe = Recipe.model_validate(facts["recipe"])
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        version = facts.get("versions", {}).get("samecurve") or "unknown"
        raise ConfigurationError(
            f"{file}: the recipe does not fit this version of samecurve ({keys}); version {version} wrote it"
        ) from error
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"trust_remote_code": False})})


def with_code(recipe: Recipe, option: bool) -> Recipe:
    """Allow a run's recipe the code of its models and tokenizer, by the option or the user's list."""
    trusted = trusted_code.allows(option, *recipe.model_paths)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"trust_remote_code": trusted})})


def ran_own_code(folder: Path) -> bool:
    """Whether the run that `folder` belongs to trained code that came with its model, by run.json. No permission."""
    directory = run_directory(folder)
    schema = {"recipe": {"model": {"trust_remote_code": bool}}}
    facts = read_record(directory / "run.json", schema).value if directory else None
    return bool(facts) and facts["recipe"]["model"]["trust_remote_code"]
