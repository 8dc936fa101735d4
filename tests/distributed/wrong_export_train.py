"""train.py whose exports are another model than the trained one, as $SAMECURVE_WRONG_EXPORT says.

epsilon: config.json has another rms_norm_eps, so that all weights are right and the logits are not. family: it names a
family that transformers does not know. Nothing is uploaded to checkpoint.mirror before the run's end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import fsspec

import train
from samecurve.checkpoint.mirror import Mirror
from samecurve.export import hf_export
from samecurve.run import lifecycle

CHANGES = {"epsilon": {"rms_norm_eps": 0.01}, "family": {"model_type": "unheard_of"}}
intact = hf_export._write_config


def write_wrong_config(skeleton, directory: Path, target, **options) -> None:
    intact(skeleton, directory, target, **options)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | CHANGES[os.environ["SAMECURVE_WRONG_EXPORT"]]))


if __name__ == "__main__":
    hf_export._write_config = write_wrong_config
    Mirror._work = lambda mirror: None
    fsspec.config.conf["file"] = {"auto_mkdir": True}  # so that file:// does for a store
    lifecycle.end_with(train.main)
