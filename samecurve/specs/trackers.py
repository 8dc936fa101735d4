"""The experiment trackers that Accelerate 1.15 knows, by its names. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

# name -> (module, what pip installs)
TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "aim": ("aim", "aim"),
    "clearml": ("clearml", "clearml"),
    "dvclive": ("dvclive", "dvclive"),
    "swanlab": ("swanlab", "swanlab"),
}
if TYPE_CHECKING:
    TrackerName = str
else:
    TrackerName = Literal[tuple(TRACKERS)]

# of the environment variables that say where a tracker sends its metrics, such as MLFLOW_TRACKING_URI
PREFIXES = {"wandb": "WANDB_", "mlflow": "MLFLOW_", "comet_ml": "COMET_", "clearml": "CLEARML_", "swanlab": "SWANLAB_"}
PREFIXES |= {"trackio": "TRACKIO_", "aim": "AIM_", "dvclive": "DVC_"}

RUN_IDS = "trackers/runs.json"
"""In logging_dir and in the run directory: the run's names in its trackers, by which a later session continues it."""
