"""Three pipeline schedules as lists of work, and a clock that shows where a rank has to wait. Needs no torch.

The work of a micro-batch on a stage has three parts, here one unit of time each (for a linear layer all three are one
matrix product):
    F  forward            needs the F of the stage before
    B  input's gradient   needs the B of the stage after; the stage before waits for it
    W  weights' gradient  nobody waits for it; yet an uncut backward hands on the input's gradient after B and W

With p stages and m micro-batches, stage s
    GPipe        does all F, then all B and W. It waits 3 (p - 1) units and holds the inputs of all m micro-batches.
    1F1B         begins backward as soon as it can. It waits as long, and holds p - s micro-batches at most.
    zero bubble  is 1F1B with the backward cut in two: W steps back where another stage waits for a B. It waits p - 1
                 units, and holds p micro-batches at most, since an input is needed until its W.

Huang et al., "GPipe", 2018 (arXiv:1811.06965); Narayanan et al., "PipeDream", 2019 (arXiv:1806.03377) and "Efficient
Large-Scale Language Model Training on GPU Clusters", 2021 (arXiv:2104.04473), whose flush this 1F1B has; Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241), schedule ZB-H1.
"""

Work = tuple[str, int]  # F, B or W, and the micro-batch


def gpipe(stage: int, stages: int, m: int) -> list[Work]:
    return [("F", i) for i in range(m)] + [(kind, i) for i in range(m) for kind in "BW"]


def one_forward_one_backward(stage: int, stages: int, m: int) -> list[Work]:
    return _alternating(min(stages - 1 - stage, m), 0, m)


def zero_bubble(stage: int, stages: int, m: int) -> list[Work]:
    return _alternating(min(stages - 1 - stage, m), stage, m)


def _alternating(ahead: int, lag: int, m: int) -> list[Work]:
    """`ahead` forwards first, then F and B in turn. W follows its B after `lag` more of them, or when no B is left."""
    work: list[Work] = [("F", i) for i in range(ahead)]
    for i in range(m):
        work += [("F", i + ahead)] if i + ahead < m else []
        work += [("B", i)] + ([("W", i - lag)] if i >= lag else [])
    return work + [("W", i) for i in range(max(0, m - lag), m)]


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "zero bubble": zero_bubble}


def timetable(name: str, stages: int, m: int) -> list[list[str]]:
    """Return what each stage does in each unit of time, `F3` for example, and `--` where it waits."""
    handed_on = "B" if name == "zero bubble" else "W"
    left = [SCHEDULES[name](stage, stages, m) for stage in range(stages)]
    table: list[list[str]] = [[] for _ in left]
    done: set[tuple[int, str, int]] = set()
    while any(left):
        now = []
        for stage, work in enumerate(left):
            kind, i = work[0] if work else ("", 0)
            needed = {"F": (stage - 1, "F", i), "B": (stage + 1, handed_on, i)}.get(kind)
            ready = bool(work) and (needed is None or needed in done or not 0 <= needed[0] < stages)
            table[stage].append(f"{kind}{i}" if ready else "--")
            now += [(stage, *work.pop(0))] if ready else []
        done.update(now)
    return table


def idle_share(table: list[list[str]]) -> float:
    return sum(row.count("--") for row in table) / sum(map(len, table))


if __name__ == "__main__":
    for name in SCHEDULES:
        table = timetable(name, stages=4, m=6)
        print(f"{name}: {100 * idle_share(table):.0f} % idle", *map(" ".join, table), sep="\n", end="\n\n")
