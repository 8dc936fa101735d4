"""What `launch` writes for Kubernetes, against the schemas that Kubernetes and Kubeflow Trainer publish."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from samecurve.launch import scripts
from samecurve.launch.target import Target, unnamed

PACKAGES = os.environ.get("SAMECURVE_KUBERNETES", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not Path(PACKAGES, "kubernetes_validate").is_dir(),
        reason="scripts/test.sh --full installs the schemas and sets SAMECURVE_KUBERNETES",
    ),
]
TARGET = Target("recipes/pretrain.yaml", "configs/fsdp.yaml", ("data.path=/storage/texts",), unnamed(4, 8))
KUBERNETES = """
import json, sys
import kubernetes_validate
for manifest in json.load(sys.stdin):
    for version in ("1.30", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)
"""
# its models drop what they do not know
TRAINER = """
import json, sys
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
[given] = json.load(sys.stdin)
read = TrainerV1alpha1TrainJob.from_dict(given).to_dict()
assert read == given, f"not known: {given} became {read}"
"""


def accepted(code: str, manifests: list[dict]) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(manifests),
        env=os.environ | {"PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 or "alidationError" in done.stderr or "AssertionError" in done.stderr, done.stderr
    return done.returncode == 0


def test_jobs_follow_the_schemas_of_kubernetes():
    service, job = yaml.safe_load_all(scripts.job(TARGET))
    assert accepted(KUBERNETES, [service, job])
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    assert not accepted(KUBERNETES, [job])


def test_train_jobs_follow_kubeflow_trainers_models():
    job = yaml.safe_load(scripts.train_job(TARGET))
    assert accepted(TRAINER, [job])
    for path in (("trainer", "numNode"), ("runtimePatches", 0, "trainingRuntimeSpec", "templates")):
        wrong = copy.deepcopy(job)
        block = wrong["spec"]
        for key in path[:-1]:
            block = block[key]
        block[path[-1]] = 1
        assert not accepted(TRAINER, [wrong]), path
