"""Accelerate's trackers (TensorBoard), and the advice that depends on the logged records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.metrics.data_wait import WaitAdvice

if TYPE_CHECKING:
    from accelerate import Accelerator

    from samecurve.config.schema import Data
    from samecurve.metrics.meter import Meter


class Trackers:
    """Logs the record of each step.

    Args:
        folder: where TensorBoard's files are.
        log: prints one line (on rank 0 only).
    """

    def __init__(self, accelerator: Accelerator, meter: Meter, data: Data, folder: Path, log: Callable[[str], None]):
        self._accelerator, self._meter, self._folder, self._log = accelerator, meter, folder, log
        self._advice = WaitAdvice(data)
        self._is_writable = True

    def open(self, start_step: int) -> None:
        """Open the trackers. start_step: the last step of the earlier session's checkpoint, 0 in a fresh run."""
        # repeated steps replace those that the earlier session logged after its last checkpoint
        purge = {"purge_step": start_step + 1}
        self._accelerator.init_trackers(self._folder.name, init_kwargs={"tensorboard": purge})

    def log(self, record: dict) -> None:
        """Log the step's record. A failed write is reported once and does not end the run."""
        self._log(self._advice.after(record))
        self._log(self._meter.doubt(record))
        if not self._is_writable:
            return
        try:
            self._accelerator.log(self._meter.scalars(record), step=record["step"])
        except OSError as error:
            self._is_writable = False
            self._log(f"{self._folder}: {error}; nothing more is written there, metrics.jsonl has it all")
