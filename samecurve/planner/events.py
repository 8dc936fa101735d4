"""Discrete events: lanes that do one thing at a time, in a fixed order, and wait for one another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Lane(NamedTuple):
    """A resource that does one thing at a time: compute or network of a pipeline rank in one replica."""

    replica: str
    rank: int
    resource: str


@dataclass(eq=False)  # tasks are keys of dicts, equal by identity
class Task:
    """A piece of work of a lane.

    Attributes:
        needs: tasks that have to end before, each with the seconds of the message from there.
    """

    lane: Lane
    kind: str
    seconds: float
    needs: list[tuple[Task, float]] = field(default_factory=list)
    label: str = ""
    start: float = 0.0

    @property
    def end(self) -> float:
        return self.start + self.seconds


def run(tasks: Iterable[Task]) -> dict[Lane, list[Task]]:
    """Set when each task starts: as soon as its lane's previous one and all that it needs have ended.

    Args:
        tasks: those of one lane in its order.

    Returns:
        The tasks by lane.
    """
    lanes: dict[Lane, list[Task]] = defaultdict(list)
    waiting: dict[Task, int] = {}
    followers: dict[Task, list[tuple[Task, float]]] = defaultdict(list)
    for task in tasks:
        needs = [*task.needs, *((before, 0.0) for before in lanes[task.lane][-1:])]
        waiting[task] = len(needs)
        for needed, delay in needs:
            followers[needed].append((task, delay))
        lanes[task.lane].append(task)
    ready = deque(task for task, count in waiting.items() if not count)
    while ready:
        task = ready.popleft()
        for follower, delay in followers[task]:
            follower.start = max(follower.start, task.end + delay)
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    assert not any(waiting.values()), "tasks wait for each other"
    return dict(lanes)
