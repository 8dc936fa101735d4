"""Scalars that trackers hold, compared with the lines of metrics.jsonl that they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Scalars = dict[str, dict[int, float]]  # by tag and step

# fields of metrics.jsonl that no tracker gets, with the reason
UNLOGGED = {"step": "each value is logged at its step", "expert_share": "a list; expert_share_max is its scalar"}
GROUPS = {"train", "progress", "speed", "evaluate"}


def tensorboard_scalars(folder: Path) -> Scalars:
    """All events of a run directory; a step that has two of one tag fails."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
        assert len(found[tag]) == len(events.Scalars(tag)), tag
    return found


def assert_equal_to_metrics(found: Scalars, records: list[dict], rel: float) -> None:
    """Every field of every line is there and equal, and nothing else is but the smoothed loss."""
    by_name = {tag.partition("/")[2]: values for tag, values in found.items()}
    assert len(by_name) == len(found) and {tag.partition("/")[0] for tag in found} <= GROUPS, sorted(found)
    smoothed, expected = by_name.pop("smoothed_loss"), expected_scalars(records)
    assert by_name.keys() == expected.keys(), by_name.keys() ^ expected.keys()
    for name, values in expected.items():
        assert by_name[name] == pytest.approx(values, rel=rel, abs=0), (name, by_name[name], values)
    losses = list(expected["loss"].values())
    averages = [np.average(losses[:n], weights=0.9 ** np.arange(n)[::-1]) for n in range(1, len(losses) + 1)]
    by_step = dict(zip(expected["loss"], averages, strict=True))
    assert smoothed == pytest.approx(by_step, rel=max(rel, 1e-12)), (smoothed, by_step)


def expected_scalars(records: list[dict]) -> Scalars:
    """The numbers of metrics.jsonl by field, without UNLOGGED; null is nothing to log."""
    expected: Scalars = {}
    for record in records:
        for name, value in record.items():
            if name not in UNLOGGED and value is not None:
                expected.setdefault(name, {})[record["step"]] = value
    return expected
