"""Comparison of a run with the checkpoint that it resumes from: allowed changes are logged, others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Recipe keys that may not change. The contents of model and data are compared directly (interfaces/fingerprint.py), so
# their paths may change.
FIXED = ("task", "seed", "optimizer.name", "optimizer.bf16_rounding")
_BEFORE_THE_KEY = {"bf16_rounding": "stochastic"}  # the value in effect for checkpoints older than the key
UNKNOWN = "unknown then"  # of a key that the checkpoint is older than
# Recipe keys that change the rows.
_OF_ROWS = ("data.", "tokenizer.", "batch.sequence_length", "batch.global_batch_size")
# Recipe keys whose changes are not logged.
SILENT = (
    *("output_dir", "data.cache_dir", "data.num_workers", "logging.every_steps", "logging.on_failure"),
    *("profile.steps", "profile.ranks", "rehearse", "memory.limit_gib", "checkpoint.mirror"),
)


def refusals(saved: dict, now: dict) -> list[str]:
    """List every reason why the run may not resume; [] if it may.

    Args:
        saved: the content of the checkpoint's state.json: `recipe`, `model`, `data`, `step`, ...
        now: the same facts about the current run.
    """
    recipe_changes = list(_differences(_with_every_key(saved["recipe"]), _with_every_key(now["recipe"])))
    reasons = [text for key, text in recipe_changes if key in FIXED]
    reasons += [f"model.{text}" for _, text in _differences(*_shared(saved["model"], now["model"]))]
    of_rows = [text for key, text in recipe_changes if key.startswith(_OF_ROWS) and key not in SILENT]
    for key, text in _differences(saved["data"], now["data"]):
        # of the rows only a hash is known, which nobody can read
        causes = ", ".join(of_rows) or f"the content of {_data(now)}, or of the tokenizer, has changed"
        reasons.append(f"other rows: {causes}" if key == "rows" else f"data, changed since the checkpoint: {text}")
    before, after = ({"adapter": facts.get("adapter")} for facts in (saved, now))
    path = now["recipe"].get("model", {}).get("path")
    base = f"model.path: the weights of {path} are not those that the adapter of the checkpoint belongs to"
    reasons += [base if key == "adapter.base_model" else text for key, text in _differences(before, after)]
    # a checkpoint that is older than this key cannot be compared
    if "reference" in saved and saved["reference"] != now["reference"]:
        reasons.append(
            "model.path: the run's loss uses its initial weights as reference, and these weights differ from "
            "them; give the folder of the initial weights"
        )
    steps, epochs = now["recipe"]["steps"], now["recipe"].get("epochs")
    if steps < saved["step"]:
        given = f"epochs: {epochs:g}, which are {steps} steps" if epochs else f"steps: {steps}"
        reasons.append(f"{given}, but the checkpoint already is at step {saved['step']}")
    return reasons


def without_effect(saved: dict, now: dict) -> list[str]:
    """List the changed recipe keys that have no effect on a run without a step left. Arguments as in `refusals`."""
    used = ("steps", "epochs", "batch.micro_batch_size", *SILENT)
    known = ((key, text) for key, text in _differences(saved["recipe"], now["recipe"]) if UNKNOWN not in text)
    return [text.replace(":", "", 1) for key, text in known if key not in used and not key.startswith("export.")]


def _data(facts: dict) -> str:
    """Name the training data of a recipe."""
    data = facts["recipe"].get("data", {})
    mixed = ", ".join(source["path"] for source in data.get("mixture") or ())
    return data.get("path") or data.get("source") or mixed or "the data"


def changes(saved: dict, now: dict) -> list[str]:
    """List the allowed changes: recipe keys, strategy, number of processes, versions, own code.

    Arguments as in `refusals`.
    """
    recipe_changes = _differences(saved["recipe"], now["recipe"])
    # `refusals` compares the adapter as a whole, with a fingerprint of its base model instead of a path
    unlogged = (*FIXED, *SILENT)
    allowed = [text for key, text in recipe_changes if key not in unlogged and not key.startswith("adapter")]
    for key in ("strategy", "world_size", "versions", "own_code"):
        before, after = ({key: facts.get(key, {})} for facts in (saved, now))
        allowed += [text for _, text in _differences(before, after)]
    common = _shared(saved["model"], now["model"])[0].keys()
    for key in sorted((saved["model"].keys() | now["model"].keys()) - common):
        allowed.append(f"model.{key}: known to only one of the two versions of transformers")
    return allowed


def _with_every_key(recipe: dict) -> dict:
    return recipe | {"optimizer": _BEFORE_THE_KEY | recipe.get("optimizer", {})}


def _shared(before: dict, after: dict) -> tuple[dict, dict]:
    """Reduce both configurations to their common keys: the fields differ between versions of transformers.

    Ignoring a field is safe because the shapes of the trained parameters are compared too.
    """
    common = before.keys() & after.keys()
    return {key: before[key] for key in common}, {key: after[key] for key in common}


def _differences(before: dict, after: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, "key: before -> after") for every leaf that differs."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            was = _shown(old) if key in before else UNKNOWN
            yield f"{prefix}{key}", f"{prefix}{key}: {was} -> {_shown(new)}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
