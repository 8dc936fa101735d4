"""Metrics of each optimizer step: loss, throughput, use of the device's peak (MFU, HFU), waiting for data."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samecurve.models import routers
from samecurve.models.activation_checkpointing import repeated_share
from samecurve.models.flops import Peak, TokenFlops, device_peak, stated, token_flops
from samecurve.specs.gpus import GIB

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import StepResult
    from samecurve.interfaces.task import Task

SMOOTHING = 0.9
GROUPS = {
    "loss": "train",
    "smoothed_loss": "train",
    "grad_norm": "train",
    "router_loss": "train",
    "router_z_loss": "train",
    "expert_share_max": "train",
    "learning_rate": "train",
    "rewards_chosen": "train",
    "rewards_rejected": "train",
    "margin": "train",
    "accuracy": "train",
    "tokens": "progress",
    "input_tokens": "progress",
    "samples": "progress",
    "epoch": "progress",
    "skipped_steps": "progress",
}


@dataclass(frozen=True)
class Machine:
    """Hardware reference of the metrics.

    Attributes:
        num_devices: number of devices of all ranks.
        peak: peak throughput of one device; None if unknown.
        peak_memory: returns this process's peak memory so far, in bytes.
    """

    num_devices: int
    peak: Peak | None
    peak_memory: Callable[[], int]


class Meter:
    """Times the steps and maintains the smoothed loss.

        meter.restart_clock()
        for step in ...:
            ...
            record = meter.step(step, result, learning_rate, data_wait_seconds)

    A step lasts from the previous call of `step` or `start` to this call of `step`. Call `start` after work that is not
    training (evaluation).

    Args:
        counts: what a step's `tokens` counts.
        chunked: whether the output head leaves out the tokens that are not trained.
        num_rows: of an epoch; None without epochs.
        rates: of groups, by pattern, as a multiple of the schedule's.
        trained_share: of the input tokens, those that the loss reads; None where `tokens` counts these.
    """

    def __init__(
        self,
        flops: TokenFlops | None,
        machine: Machine,
        clock: Callable[[], float] = time.perf_counter,
        counts: str = "tokens",
        chunked: bool = False,
        num_rows: int | None = None,
        rates: Mapping[str, float] | None = None,
        trained_share: float | None = None,
    ):
        self.machine = machine
        self.smoothed_loss: float | None = None
        self._flops = flops
        self._counts = counts
        self._chunked = chunked
        self._num_rows, self._rates, self._trained_share = num_rows, rates or {}, trained_share
        self._clock = clock
        self._average = self._weight = 0.0
        self._since = clock()
        self._doubted = False

    @classmethod
    def for_run(
        cls, recipe: Recipe, model: PreTrainedModel, accelerator: Accelerator, task: Task, chunked: bool
    ) -> Meter:
        """Create the meter of a run. Rank 0 looks up or measures its device's peak; other ranks omit mfu and hfu.

        With a `chunked` output head (chunked_cross_entropy.py), only trained tokens count for the head's FLOPs.
        """
        device = accelerator.device
        implementation = model.config._attn_implementation or ""  # None: the model has no attention
        recompute, attention = repeated_share(recipe.memory, model, implementation)
        router = routers.settings(recipe.model.router_loss, model)
        routed = router is not None and router.kind == "batch"
        # a momentum encoder has one; the pass of router_loss: batch leaves out a chunked head, but not a whole one
        rehearsed = (task.context is not None) + (task.momentum_queue is not None) + (routed and not chunked)
        length = recipe.batch.sequence_length
        flops = token_flops(model, length, recompute, rehearsed, attention, routed and chunked)
        peak = device_peak(device, recipe.precision) if accelerator.is_main_process else None
        machine = Machine(accelerator.num_processes, peak, lambda: peak_memory_bytes(device))
        has_epochs = not recipe.data.streaming and recipe.data.mixture is None
        num_rows = len(task.train) if has_epochs else None
        settings = recipe.optimizer
        rates = {g.pattern: g.learning_rate / settings.learning_rate for g in settings.groups if g.learning_rate}
        share = None if task.counts == "tokens" else task.train.trained_share
        return cls(
            flops, machine, counts=task.counts, chunked=chunked, num_rows=num_rows, rates=rates, trained_share=share
        )

    @property
    def flops(self) -> dict:
        """The basis of mfu and hfu, for run.json."""
        return stated(self._flops, self.machine.peak)

    def restart_clock(self) -> None:
        self._since = self._clock()

    @property
    def state(self) -> dict:
        """State of the smoothed loss, for checkpoints. Assign it to resume."""
        return {"average": self._average, "weight": self._weight}

    @state.setter
    def state(self, values: dict) -> None:
        self._average, self._weight = values.get("average", 0.0), values.get("weight", 0.0)
        self.smoothed_loss = self._average / self._weight if self._weight else None

    def step(
        self,
        step: int,
        result: StepResult,
        learning_rate: float,
        samples: int,
        data_wait_seconds: float,
        num_inputs: int | None = None,
        width_share: float = 1.0,
    ) -> dict:
        """Make the step's record of metrics.jsonl; see docs/run_directory.md.

        Args:
            samples: rows consumed so far.
            data_wait_seconds: time in this step spent waiting for data.
            num_inputs: tokens that the models of all ranks read, without padding. Prompt tokens cost work but are not
                trained. Default: the number of trained tokens.
            width_share: of sequence_length, the width that the step's rows have (data.group_by_length).

        Returns:
            The record. `tokens`, `input_tokens` and `tokens_per_second` are those of all ranks; if the task counts rows
            or pairs, `tokens_per_second` counts the tokens read. `mfu` and `hfu` are fractions of 1.
            `peak_memory_gib` is that of this process. A value is None if it is unknown on this machine or nothing was
            trained.
        """
        seconds = self._clock() - self._since
        self.restart_clock()
        trained = result.tokens > 0
        if trained and math.isfinite(result.loss):  # nan would stay in the average for good
            # bias-corrected exponential moving average (as in Adam, arXiv:1412.6980, section 3)
            self._average = SMOOTHING * self._average + (1 - SMOOTHING) * result.loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
            self.smoothed_loss = self._average / self._weight
        num_inputs = (num_inputs or result.tokens) if trained else 0  # without trained tokens nothing was computed
        num_trained = result.tokens if self._trained_share is None else num_inputs * self._trained_share
        rate = (result.tokens if self._counts == "tokens" else num_inputs) / seconds
        return {
            "step": step,
            "loss": result.loss if trained else None,
            "grad_norm": result.grad_norm if trained else None,
            **result.router,
            "learning_rate": learning_rate,
            **{f"learning_rate {pattern}": learning_rate * factor for pattern, factor in self._rates.items()},
            "tokens": result.tokens,
            "input_tokens": num_inputs,
            "samples": samples,
            "epoch": samples / self._num_rows if self._num_rows else None,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            **self._utilisation(num_inputs, num_trained, width_share, seconds * self.machine.num_devices),
            "peak_memory_gib": self.machine.peak_memory() / GIB,
            "data_wait_fraction": data_wait_seconds / seconds,
        }

    def _utilisation(
        self, num_inputs: int, num_trained: float, width_share: float, device_seconds: float
    ) -> dict[str, float | None]:
        if self._flops is None:
            return {"tflops_per_device": None, "mfu": None, "hfu": None}
        left_out = (num_inputs - num_trained) * self._flops.head if self._chunked else 0.0
        cut = (1 - width_share) * num_inputs  # of attention, whose work per token grows with the width
        model, hardware = (  # alike to the last bit where nothing is computed twice
            (flops * num_inputs - cut * attention - left_out) / device_seconds / 1e12
            for flops, attention in (
                (self._flops.model, self._flops.attention),
                (self._flops.hardware, self._flops.hardware_attention),
            )
        )
        peak = self.machine.peak
        return {
            "tflops_per_device": model,
            "mfu": model / peak.tflops if peak else None,
            "hfu": hardware / peak.tflops if peak else None,
        }

    def doubt(self, record: dict) -> str:
        """Return a warning for the first record whose mfu or hfu exceeds 1, else "". record: the result of `step`."""
        impossible = {name: record[name] for name in ("mfu", "hfu") if record[name] is not None and record[name] > 1}
        if not impossible or self._doubted:
            return ""
        self._doubted = True
        peak, flops = self.machine.peak, self._flops
        assert peak is not None and flops is not None  # mfu and hfu are computed from both
        shares = " and ".join(f"{name} {value:.2f}" for name, value in impossible.items())
        return (
            f"warning: step {record['step']} has {shares}, but more than 1 is impossible: the peak of "
            f"{peak.tflops:.3g} TFLOP/s ({peak.source}) is too low, or attention, which is counted over the full "
            f"square of a row ({flops.attention / flops.model:.0%} of the FLOPs), skipped a part; do not rely on mfu "
            "and hfu of this run"
        )

    def scalars(self, record: dict) -> dict[str, float]:
        """Convert a record for TensorBoard: grouped names, only finite numbers (no lists, as expert_share is)."""
        values = {**record, "smoothed_loss": self.smoothed_loss}
        return {
            f"{'evaluate' if name.startswith('eval_') else GROUPS.get(name.partition(' ')[0], 'speed')}/{name}": value
            for name, value in values.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: on a GPU that allocated by PyTorch, elsewhere the process's peak resident set."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # bytes on macOS, KiB on Linux


def device_memory_bytes(device: torch.device, processes: int) -> int:
    """Return the memory of a GPU, or the share of the host's memory that one of its `processes` has."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(processes, 1)


WINDOW_STEPS = 50
FEWEST_STEPS = 20  # a start waits for workers that begin; too few steps would give that wait too much weight
THRESHOLD = 0.05


class WaitAdvice:
    """Monitors the share of time that rank 0 spent waiting for data, over the last WINDOW_STEPS steps together."""

    def __init__(self, data: Data):
        self._data = data
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (seconds of waiting, seconds of step)
        self._first, self._reported = True, False

    def after(self, record: dict) -> str:
        """Return the advice when THRESHOLD is first exceeded, else "". record: the step's line of metrics.jsonl."""
        if self._reported or self._first:
            self._first = False
            return ""
        seconds = record["step_seconds"]
        self._steps.append((record["data_wait_fraction"] * seconds, seconds))
        waited, all_seconds = map(sum, zip(*self._steps, strict=True))
        if len(self._steps) < FEWEST_STEPS or waited <= THRESHOLD * all_seconds:
            return ""
        self._reported = True
        share = f"{waited / all_seconds:.0%} of the time of the last {len(self._steps)} steps"
        advice = "the stream is read and tokenised too slowly; data.streaming=false tokenises the data before training"
        if not self._data.streaming:
            workers = self._data.num_workers
            advice = f"data.num_workers is {workers}; try {max(1, 2 * workers)}, or measure how many are enough: "
            advice += "python -m samecurve bench dataloader RECIPE"
        return f"waiting for data took {share}: {advice}"
