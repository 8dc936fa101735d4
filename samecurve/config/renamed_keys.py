"""Renamed recipe keys and values.

A recipe in the old spelling is refused with the new name. What an earlier version saved (run.json, a checkpoint's
state.json) is read in the new spelling, so that its run can be resumed.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml

from samecurve.config.documents import ConfigProblem, Document, KeyPath, describe, merge_blocks

# A block comes after its keys, so that only the keys that no entry names are renamed with it.
RENAMED_KEYS = {
    "data.held_out_fraction": "data.validation_fraction",
    "memory.every_k": "memory.every_n_layers",
    "memory.selective_keeps": "memory.selective_save",
    "optimizer.bf16_update": "optimizer.bf16_rounding",
    "schedule.final_ratio": "schedule.min_lr_ratio",
    "guard.compare_replicas_every_steps": "numerics.compare_replicas_every_steps",
    "guard.max_skipped_steps": "numerics.max_skipped_steps",
    "guard.rollback_ratio": "numerics.rollback_ratio",
    "timeout.step_seconds": "watchdog.timeout_seconds",
    "guard": "numerics",
    "timeout": "watchdog",
}
RENAMED_VALUES = {
    "memory.activation_checkpointing": {"every_k": "every_n_layers"},
    "memory.gradient_sync": {"once": "last_micro_batch"},
}


def refuse_old_names(document: Document) -> None:
    """Report every old name and replace it with the new one, so that the rules check the intended key."""
    for old, new in _rename_keys(document.content):
        inside = {path[len(old) :]: place for path, place in document.places.items() if path[: len(old)] == old}
        # `guard.key=1` gives the block no place of its own
        place = inside.get((), next(iter(inside.values()), document.place(old)))
        document.problems.append(ConfigProblem(place, ".".join(old), f"renamed to {'.'.join(new)}"))
        document.places |= {(*new, *path): place for path, place in inside.items()}
    for path, old_value, new_value in _rename_values(document.content):
        document.problem(path, f"found {describe(old_value)}, renamed to {new_value}")


def in_new_names(saved: dict[str, Any]) -> dict[str, Any]:
    """Translate `recipe` and `overrides` of a saved run.json or state.json to the present spelling."""
    saved = copy.deepcopy(saved)
    if isinstance(saved.get("recipe"), dict):
        _rename_keys(saved["recipe"])
        _rename_values(saved["recipe"])
    if isinstance(saved.get("overrides"), list):
        saved["overrides"] = [_rename_override(override) for override in saved["overrides"]]
    return saved


def _rename_keys(recipe: dict[str, Any]) -> list[tuple[KeyPath, KeyPath]]:
    """Move the value of each old key to the new one, overwriting it. Returns the paths (old, new)."""
    renamed = []
    for old, new in RENAMED_KEYS.items():
        (*old_block, old_key), (*new_block, new_key) = old.split("."), new.split(".")
        source = _block(recipe, old_block)
        if old_key not in source:
            continue
        value = source.pop(old_key)
        # otherwise the entry of the block itself would report it a second time
        if old_block and not source:
            del recipe[old_block[0]]
        target = _block(recipe, new_block)
        if new_block and not target:
            recipe[new_block[0]] = target
        both = isinstance(value, dict) and isinstance(target.get(new_key), dict)
        target[new_key] = merge_blocks(target[new_key], value) if both else value
        renamed.append(((*old_block, old_key), (*new_block, new_key)))
    return renamed


def _rename_values(recipe: dict[str, Any]) -> list[tuple[KeyPath, str, str]]:
    """Replace each old value. Returns (path, old value, new value)."""
    renamed = []
    for dotted, values in RENAMED_VALUES.items():
        block_name, key = dotted.split(".")
        block = _block(recipe, [block_name])
        value = block.get(key)
        if isinstance(value, str) and value in values:
            block[key] = values[value]
            renamed.append(((block_name, key), value, values[value]))
    return renamed


def _rename_override(override: str) -> str:
    """`key=value` in the present spelling; the value may be a block (`memory={every_k: 3}`)."""
    key, equals, value = override.partition("=")
    content = yaml.safe_load(value) if value.startswith("{") else None
    if isinstance(content, dict):
        nested: dict[str, Any] = {key: content}
        _rename_keys(nested)
        _rename_values(nested)
        return "".join(f"{name}={json.dumps(block)}" for name, block in nested.items())
    return f"{RENAMED_KEYS.get(key, key)}{equals}{RENAMED_VALUES.get(key, {}).get(value, value)}"


def _block(recipe: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The top level or the block of that name; a new one where it is absent."""
    found = recipe.get(path[0]) if path else recipe
    return found if isinstance(found, dict) else {}
