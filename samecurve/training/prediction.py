"""Prediction of a run's step time and memory, by the planner in a process of its own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.engines import factory
from samecurve.metrics.meter import device_memory_bytes
from samecurve.specs.gpus import GIB

if TYPE_CHECKING:
    from samecurve.training.session import Context

FORECAST = "samecurve.planner.forecast"
PREDICTION_SECONDS = 60.0  # the process takes less than a second


def predict(context: Context, fields: dict, peak_tflops: float | None) -> dict:
    """Predict step time and memory in a short process of its own, because nothing that trains depends on the planner.

    Args:
        fields: of the model's Hugging Face config.
        peak_tflops: of matrix products on this device; None if unknown.

    Returns:
        See planner/forecast.forecast; only `reason` where the process has failed.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", context.plan.strategy.world_size))
    device = {
        "name": factory.device_name(context.accelerator),
        "memory_gib": device_memory_bytes(context.accelerator.device, processes) / GIB,
        "peak_tflops": peak_tflops,
        "per_node": processes,
    }
    # python -m would look for the package in the working directory first, where files of other names may be its modules
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[0] = {root!r}; import runpy; runpy.run_module({FORECAST!r}, run_name='__main__')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps((context.plan, fields, device)),
            capture_output=True,
            timeout=PREDICTION_SECONDS,
            check=True,
        )
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"reason": f"the planner's process failed with exit code {error.returncode}: {''.join(last)}"}
    # pickle raises the last three for what it cannot write
    except (OSError, ValueError, subprocess.SubprocessError, pickle.PicklingError, TypeError, AttributeError) as error:
        return {"reason": f"the planner's process failed: {error}"}
