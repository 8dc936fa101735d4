"""The state.json of a checkpoint, as small as its reader takes it."""

from __future__ import annotations

from typing import Any


def saved_state(**changes: Any) -> dict:
    state = {"format": 1, "step": 1, "updates": 1, "samples": 8, "meter": {}, "record": {}, "loss_scale": {}}
    state |= {"generators": {}, "recipe": {}, "strategy": "ddp", "world_size": 1, "versions": {}}
    return state | {"model": {}, "data": {"rows": "0"}, "adapter": None, "reference": None} | changes
