"""Share of the time in which a job makes progress although nodes fail: checkpoints, lost work and restarts.

Failures are independent and a node fails after an exponentially distributed time. A job of n nodes then fails after M,
the mean time of one node divided by n, on average. J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22 (2006), gives the expected time of a job that saves
for C after every t of work and needs R to restart, where saving and restarting can fail, too:
M exp(R / M) (exp((t + C) / M) - 1) for each t. J. W. Young, Communications of the ACM 17 (1974): t = sqrt(2 C M).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from samecurve.planner.constants import ASSUMED, MEASURED, Constant

LEAST_PROGRESS = 1e-6  # below, a simulated job is given up


@dataclass(frozen=True)
class Reliability:
    """Frequency and cost of node failures, and the slowness of the slowest nodes.

    Attributes:
        node_mtbf_hours: mean time between failures of one node. Llama 3's 16,384 H100s had 419 unexpected interruptions
            in 54 days: 2,048 nodes x 1,296 h / 419.
        restart_seconds: from a failure until the job trains again.
        checkpoint_gb_per_s_per_node: rate at which training waits for its state to be saved.
        slow_nodes: number of stragglers.
        slow_factor: their time for the same work, as a multiple of the others'.
    """

    node_mtbf_hours: float = Constant(6334, "h", MEASURED, "Llama 3 (arXiv:2407.21783, section 3.3.4)")
    restart_seconds: float = Constant(600, "s", ASSUMED, "noticing, another node, start, reading")
    checkpoint_gb_per_s_per_node: float = Constant(1, "GB/s", ASSUMED, "rate of writing")
    slow_nodes: float = 0
    slow_factor: float = Constant(1.1, "multiple of the others' time", ASSUMED, "of a slow node")


@dataclass(frozen=True)
class Failures:
    """Seconds of a job: mean time between failures M, of a checkpoint C, and of a restart R."""

    mean_between: float
    checkpoint: float
    restart: float

    def goodput(self, interval: float) -> float:
        """Return the share of the time that is work, of which `interval` seconds lie between checkpoints (Daly)."""
        mean = self.mean_between
        failing = (self.restart + interval + self.checkpoint) / mean
        if failing > 700:  # no interval ends before a failure; exp overflows at 710
            return 0.0
        return interval / mean / (math.exp(self.restart / mean) * math.expm1((interval + self.checkpoint) / mean))

    @property
    def young(self) -> float:
        """First-order estimate of the best interval, in seconds."""
        return math.sqrt(2 * self.checkpoint * self.mean_between)

    @property
    def daly(self) -> float:
        """Higher-order estimate of the best interval, in seconds; M where saving takes 2 M or longer."""
        half = self.checkpoint / (2 * self.mean_between)
        if half >= 1:
            return self.mean_between
        return self.young * (1 + math.sqrt(half) / 3 + half / 9) - self.checkpoint

    @property
    def best(self) -> float:
        """Interval of the highest goodput, in seconds: where exp((t + C) / M) (1 - t / M) = 1. It lies below M."""
        low, high = 0.0, self.mean_between
        for _ in range(100):
            middle = (low + high) / 2
            left = (middle + self.checkpoint) / self.mean_between + math.log1p(-middle / self.mean_between)
            low, high = (middle, high) if left > 0 else (low, middle)
        return (low + high) / 2


def simulate(failures: Failures, interval: float, num_failures: int, seed: int = 0) -> float:
    """Return the goodput of a job that goes on until it has failed so often, event by event.

    Args:
        failures: times of a failure, a checkpoint and a restart.
        interval: seconds of work between checkpoints.
        num_failures: number of failures after which the job ends.
        seed: seed of the times of failures.
    """
    chance = random.Random(seed)
    clock = work = 0.0
    next_failure = chance.expovariate(1 / failures.mean_between)
    failed = 0
    while failed < num_failures:
        segment = interval + failures.checkpoint
        whole = int((next_failure - clock) // segment)  # intervals that end with a checkpoint before the failure
        work += whole * interval
        failed += 1
        clock = next_failure + failures.restart
        next_failure += chance.expovariate(1 / failures.mean_between)
        while next_failure < clock and failed < num_failures:  # the restart fails, too
            failed += 1
            clock = next_failure + failures.restart
            next_failure += chance.expovariate(1 / failures.mean_between)
    return work / clock
