"""A job as JSON, in run.json, from which `plan --calibrate` predicts a run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from samecurve.planner.cluster import Host
from samecurve.planner.hardware import Gpu
from samecurve.planner.job import Job, Sharding, StateBytes
from samecurve.planner.layout import Layout
from samecurve.planner.links import Level
from samecurve.planner.shape import ModelShape

PARTS = {"shape": ModelShape, "layout": Layout, "card": Gpu, "states": StateBytes, "host": Host, "sharding": Sharding}


def record(job: Job) -> dict[str, Any]:
    """Return the job without what was learnt from other runs."""
    return {name: value for name, value in asdict(job).items() if name != "calibration"}


def job(content: Mapping[str, Any]) -> Job:
    """Read a job again. Raises TypeError, KeyError or ValueError for one that this version does not know."""
    # JSON has lists in place of tuples, and a job must equal the one that was recorded
    shape = {key: tuple(value) if isinstance(value, list) else value for key, value in content["shape"].items()}
    parts = {name: kind(**({**content, "shape": shape}[name])) for name, kind in PARTS.items()}
    levels = tuple(Level(**{**each, "measured": tuple(map(tuple, each["measured"]))}) for each in content["levels"])
    return Job(**{**content, **parts, "levels": levels, "offload": tuple(content["offload"])})
