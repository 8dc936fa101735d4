"""What the ranks of a pipeline did in a profiled step, and how long they would wait if all work took equally long."""

from __future__ import annotations

from collections.abc import Sequence

from harness import Run

from samecurve.metrics.profiling.trace import read_trace
from samecurve.strategy.timetables import Entry, Pass, ScheduleRun, order

COSTS = {"F": 1, "I": 1, "W": 1, "B": 2}


def traced(run: Run) -> list[list[Entry]]:
    """Each rank's work of a step; its traces have exactly this order in every recorded step."""
    found, name = [], run.facts["engine"].removeprefix("Schedule")
    for rank in (0, 1):
        (path,) = run.directory.glob(f"profile/step_*/rank{rank}.pt.trace.json.gz")
        annotations = [each for each in read_trace(path) if each.get("cat") == "user_annotation"]
        ranges = [each["name"] for each in sorted(annotations, key=lambda each: each["ts"])]
        steps = [each for each in ranges if ScheduleRun.of_range(each)]
        assert steps == [ScheduleRun(name, rank, 2, 4).range] * 3  # of two ranks and four micro-batches
        entries = order(name, rank, 2, 4)
        passes = [work for each in ranges if (work := Pass.of_range(each))]
        assert passes == [work for entry in entries for work in entry] * 3, (name, rank)
        found.append(entries)
    return found


def replayed_idle(orders: Sequence[list[Entry]]) -> list[float]:
    """Each rank's share of waiting in a step, if F, I and W took equally long, B twice that, and messages no time."""
    last = max(work.stage for row in orders for entry in row for work in entry)
    done: dict[tuple[int, bool, int], int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)

    def begins(work: Pass) -> int | None:
        """When its input is there; None: not yet."""
        if work.kind == "W" or (work.kind, work.stage) == ("F", 0):
            return 0
        if work.kind == "F":
            return done.get((work.stage - 1, True, work.micro_batch))
        turns = work.stage == last
        return done.get((last if turns else work.stage + 1, turns, work.micro_batch))

    while any(place < len(row) for place, row in zip(places, orders, strict=True)):
        before = [*places]
        for rank, row in enumerate(orders):
            while places[rank] < len(row):
                entry = row[places[rank]]
                times = [time for work in entry if (time := begins(work)) is not None]
                if len(times) < len(entry):
                    break
                clocks[rank] = max(clocks[rank], *times) + sum(COSTS[work.kind] for work in entry)
                done |= {
                    (work.stage, work.kind == "F", work.micro_batch): clocks[rank] for work in entry if work.kind != "W"
                }
                places[rank] += 1
        assert places != before, "the ranks wait for each other"
    return [1 - sum(COSTS[work.kind] for entry in row for work in entry) / max(clocks) for row in orders]
