"""Predicted step time and memory of a run that is about to start, for its header, run.json, summary and report.

training/startup.py starts this module as a process, which reads (plan, fields, device) and prints `forecast`'s JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from samecurve.config.documents import Document
from samecurve.config.source import RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.planner import calibration, inputs, strategies
from samecurve.planner.answers import predict
from samecurve.planner.calibrate import shown_gib
from samecurve.planner.cluster import Cluster, ClusterFile, describe_machines, node_gbit
from samecurve.planner.hardware import canonical, known_gpu
from samecurve.planner.inputs import PlanRequest
from samecurve.planner.job import to_json
from samecurve.planner.plan_text import PUBLIC
from samecurve.strategy.plan import Plan

UNCALIBRATED_CPU = "most rates of this CPU are assumed; `plan --calibrate RUN` learns them from a finished run"


@dataclass(frozen=True)
class Device:
    """The device that the process of rank 0 computes on.

    Attributes:
        name: torch's name of the GPU, or cpu.
        memory_gib: of the device; on a CPU, one process's share of the host's.
        peak_tflops: of matrix products, as measured on a CPU; None if unknown.
        per_node: processes on one host.
    """

    name: str
    memory_gib: float
    peak_tflops: float | None = None
    per_node: int = 1


def forecast(plan: Plan, fields: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Predict a run, in milliseconds.

    Args:
        plan: with the micro-batch size that the run uses.
        fields: of the model's Hugging Face config, its vocabulary that of the run.

    Returns:
        `predicted` of run.json: `step_seconds` and `peak_memory_gib` of rank 0, each with an 80 % `..._interval`,
        `basis`, `left_out`, `job` and `assumed`, whether the rates of the device are guesses that nobody should read;
        or only `reason`, why there is no prediction.
    """
    try:
        inputs.refuse(plan.recipe)
        machines = _machines(device, plan.strategy.world_size)
        source = RecipeSource(Document(plan.recipe_path), plan.recipe, frozenset())
        # of multimodal models
        text_fields = fields.get("text_config") or fields
        request = PlanRequest.of_recipe(source, text_fields, "the model's config")
        job = strategies.job(request, plan.strategy, machines)
        prediction = predict(job)
    except (ConfigurationError, ValueError, ZeroDivisionError) as error:
        # the run goes on without a prediction
        return {"reason": str(error)}
    # a run measures rank 0, which need not be the fullest rank that `predict` is about
    first = shown_gib(job)
    assumed = machines.kind == "cpu" and not machines.calibration
    uncalibrated = UNCALIBRATED_CPU if assumed else PUBLIC
    return {
        "step_seconds": prediction.seconds,
        "step_seconds_interval": list(prediction.seconds_interval),
        "peak_memory_gib": first,
        "peak_memory_gib_interval": [first * end / prediction.memory_gib for end in prediction.memory_interval],
        "basis": machines.calibration.describe() if machines.calibration else uncalibrated,
        "assumed": assumed,
        "left_out": inputs.left_out(request, job.card),
        "job": to_json(job),
    }


def _machines(device: Device, world_size: int) -> Cluster:
    """Describe the run's machines. Raises ConfigurationError for a GPU without known rates."""
    card = known_gpu(device.name)
    if not card:
        raise ConfigurationError(f"no rates of a GPU called {device.name} are known")
    learnt = calibration.read(calibration.default_path(canonical(device.name)))
    per_node = min(device.per_node, world_size)
    file = ClusterFile(gpu=device.name, nodes=1, gpus_per_node=per_node, gbit_per_s_per_node=node_gbit(card))
    # a calibration of step times is relative to the assumed rates
    if device.name == "cpu" and device.peak_tflops and not (learnt and learnt.time):
        card = replace(card, matmul_tflops=device.peak_tflops, fp32_tflops=device.peak_tflops)
    machines = describe_machines(file)
    return replace(machines, card=replace(card, memory_gib=device.memory_gib), calibration=learnt)


if __name__ == "__main__":
    plan_, fields_, device_ = pickle.load(sys.stdin.buffer)
    print(json.dumps(forecast(plan_, fields_, Device(**device_))))
