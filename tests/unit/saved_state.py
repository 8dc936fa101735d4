"""The state.json of a checkpoint, as small as its reader takes it, and the hashes around it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from samecurve.checkpoint.manifest import MANIFEST, MARKER


def saved_state(**changes: Any) -> dict:
    state = {"format": 1, "step": 1, "updates": 1, "samples": 8, "meter": {}, "record": {}, "loss_scale": {}}
    state |= {"generators": {}, "recipe": {}, "strategy": "ddp", "world_size": 1, "versions": {}}
    return state | {"model": {}, "data": {"rows": "0"}, "adapter": None, "reference": None} | changes


def seal(folder: Path) -> None:
    """Manifest and marker for what the folder holds now, as whoever forges a state can write them, too."""
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (MANIFEST, MARKER)}
    files = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(contents.items())
    ]
    num_ranks = sum(name.startswith("rank_") for name in contents)
    text = json.dumps({"step": 1, "world_size": num_ranks, "files": files}).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MARKER).write_text(json.dumps({"manifest_sha256": hashlib.sha256(text).hexdigest()}))
