"""Types of what is read back from run.json, see storage/records.py. A key may be absent: another version wrote it."""

from __future__ import annotations

RUN_FACTS = {
    "recipe?": dict,
    "recipe_path?": str,
    "overrides?": [str],
    "output_dir?": str,
    "strategy?": str,
    "strategy_path?": (str, None),
    "engine?": str,
    "world_size?": range(1, 2**31),
    "device?": str,
    "precision?": str,
    "started?": str,
    "start_step?": range(2**53),
    "resumed_from?": (str, None),
    "adapter?": (dict, None),
    "accelerate?": (dict, None),
    "deepspeed?": (dict, None),
    "data?": dict,
    "data_fingerprints?": (dict, None),
    "versions?": dict,
    "own_code?": dict,
    "counts?": str,
    "predicted?": (dict, None),
}
