"""Whether a script trains the same under a strategy as in one process, and where it first does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, permutations
from pathlib import Path
from typing import Any, NamedTuple

from samecurve.prove.masks import mask_problem
from samecurve.storage.jsonl import scan

Record = dict[str, Any]
# A difference counts from this multiple of what another order of the same rows changes by rounding ...
ROUNDING_FACTOR = 20
LEAST = 2e-6  # ... and from here on in any case, relative: a few roundings of fp32
FP32 = 2**-22  # what fp32 rounds of weights in a few updates, relative to their norm
LEAST_UPDATE = 1e-3  # from where the difference of an update counts: Adam's magnifies what gradients are rounded
MOST = 0.1  # from here on it counts unless rounding alone has half of it: chaos must not excuse everything
RANDOM = 1e-2  # from here on a first loss of the same rows is one of other inputs
LEAST_NORM = 1e-6  # of gradients; below, nothing is learnt and anything agrees
KINDS = ("labels", "context", "strategy", "rows", "learning rate", "trained weights", "start", "loss", "gradients")
KINDS += ("norm", "weights", "ranks", "frozen weights", "resume", "logged", "export")


@dataclass(frozen=True)
class Run:
    """Records of a script's processes: ranks x steps. events: what rank 0 saved, exported and logged."""

    name: str
    ranks: list[list[Record]]
    events: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, name: str, folder: Path) -> Run:
        files = sorted(folder.glob("rank_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
        events = folder / "events_0.jsonl"
        ranks = [[record for _, record in scan(path) if record] for path in files]
        drop_copies(ranks)
        return cls(name, ranks, [event for _, event in scan(events) if event] if events.exists() else [])

    def after(self, step: int, saved: Run) -> Run:
        """Return the later steps, as of a run that starts with the weights of `step` that were saved."""
        ranks = [rank[step:] for rank in self.ranks]
        for rank in ranks:
            rank[0] = {**rank[0], "start": {**saved.ranks[0][0]["start"], **saved.ranks[0][step - 1]["weights"]}}
        return Run(self.name, ranks)

    def values(self, event: str) -> list[Any]:
        return [record["value"] for record in self.events if record["event"] == event]

    def __len__(self) -> int:
        return min(map(len, self.ranks), default=0)

    def rows(self, step: int) -> Counter[str]:
        """Rows that the model was given; where it is given none to be seen, their places in the data set."""
        rows = Counter(row for rank in self.ranks for row in rank[step]["rows"])
        return rows or Counter(f"row:{row}" for rank in self.ranks for part in rank[step]["indices"] for row in part)

    def loss(self, step: int) -> float:
        """The objective whose gradient the ranks average."""
        return sum(sum(rank[step]["losses"]) for rank in self.ranks) / len(self.ranks)

    def losses_by_labels(self, step: int) -> Iterator[float]:
        """The objective if ranks counted by their labels in each micro-batch, as they are and shifted, if uneven."""
        micro_batches = [*zip(*(rank[step]["losses"] for rank in self.ranks), strict=False)]
        for which in (0, 1):
            labels = ([counts[which] for counts in rank[step]["labels"]] for rank in self.ranks)
            counted = [*zip(*labels, strict=False)]
            if all(map(sum, counted)) and any(len({*counts}) > 1 for counts in counted):
                yield sum(
                    sum(loss * count for loss, count in zip(*pair, strict=True)) / sum(pair[1])
                    for pair in zip(micro_batches, counted, strict=True)
                )

    @property
    def indices(self) -> list[list[int]]:
        """Rows of the data set by micro-batch: of all ranks together, as one process would read them."""
        return [
            [row for part in parts for row in part]
            for step in range(len(self))
            for parts in zip(*(rank[step]["indices"] for rank in self.ranks), strict=False)
        ]

    @property
    def rates(self) -> list[list[float]]:
        return [record["rates"] for record in self.ranks[0]]

    def reads_as(self, other: Run) -> bool:
        """Whether both have the same rows in the same micro-batches, and the same rates."""
        return (self.indices, self.rates) == (other.indices, other.rates)


def drop_copies(ranks: list[list[Record]]) -> None:
    """Drop rows that a process reads with a loss of 0, as a copy of another process's.

    samecurve.Accelerator gives one to each process that a batch of fewer rows leaves without.
    """
    for records in zip(*ranks, strict=False):
        for record, other in permutations(records, 2):
            of_both = zip(record["losses"], record["indices"], other["losses"], other["indices"], strict=False)
            for number, (loss, rows, other_loss, other_rows) in enumerate(of_both):
                if rows and rows == other_rows and loss == 0 != other_loss:
                    record["indices"][number] = []
                    for row in [row for row in record["rows"] if row in other["rows"]][:1]:
                        record["rows"].remove(row)


class Finding(NamedTuple):
    """What is different: kind is one of KINDS; step counts from 1."""

    kind: str
    step: int
    text: str


@dataclass
class Differences:
    """Relative differences of a run at each step, and the weight whose gradient or value differs most.

    Gradients are compared with their own norms, or 1/1000 of the largest, weights with the norm of the whole model, and
    the "update", the change of all weights since the start, with its own norm.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def between(cls, run: Run, reference: Run) -> Differences:
        made = cls()
        for step in range(min(len(run), len(reference))):
            one, other = run.ranks[0][step], reference.ranks[0][step]
            made.add("loss", relative(run.loss(step), reference.loss(step)), "")
            if one["norm"] is not None and other["norm"] is not None:
                made.add("norm", relative(one["norm"], other["norm"]), "")
            for kind in ("gradients", "weights"):
                # a weight that is 0 at first may have a gradient of roundings, whose sign is all that Adam sees
                sizes = [values[0] for values in other[kind].values()]
                least = 1e-3 * max(sizes, default=0.0) if kind == "gradients" else math.hypot(*sizes)
                by_name = {
                    name: distance(one[kind][name], values, least)
                    for name, values in other[kind].items()
                    if name in one[kind]
                }
                worst = max(by_name, key=by_name.__getitem__, default="")
                made.add(kind, by_name.get(worst, 0.0), worst)
            start, weights = reference.ranks[0][0]["start"], other["weights"]
            size = max(_change(one["weights"], start), _change(weights, start))
            apart = _change(one["weights"], weights) - FP32 * _norm(weights)
            made.add("update", apart / size if apart > 0 else 0.0, "")
        return made

    def add(self, kind: str, value: float, place: str) -> None:
        self.values.setdefault(kind, []).append(value)
        self.places.setdefault(kind, []).append(place)

    def after(self, step: int) -> Differences:
        """Return those of later steps, of which the first has the largest of those before it, too."""
        return Differences(
            {kind: [max(values[: step + 1]), *values[step + 1 :]] for kind, values in self.values.items()}
        )

    def bound(self, kind: str, step: int) -> float:
        """Return what rounding may change: these are the differences of a run that read the same rows otherwise."""
        return bound(max(self.values.get(kind, [0.0])[: step + 1], default=0.0))


def bound(rounding: float) -> float:
    """Return from where a relative difference counts, given that of the same rows in another order."""
    if not math.isfinite(rounding):
        return LEAST  # what is not a number explains none
    return LEAST + min(ROUNDING_FACTOR * rounding, max(MOST, 2 * rounding))


def why_not_compared(rounding: Differences) -> str:
    """Return why runs of a script cannot be compared, or "". rounding: see `findings`."""
    first = rounding.values.get("loss", [0.0])[0]
    if not first >= RANDOM:
        return ""
    return (
        f"not judged: where one process reads the same rows once more, its first loss is {first:.1e} away, relative; "
        "what is drawn for a row (masks of a collator, augmentation) has to be the same each time it is read"
    )


def distance(one: Sequence[float], other: Sequence[float], least: float = 0.0) -> float:
    """Return the difference of two sketched tensors, relative to the larger norm, or to `least` if that is more.

    Infinite if a number is NaN.
    """
    size = max(one[0], other[0], least)
    squares = sum((a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)) / (len(one) - 1)
    difference = math.sqrt(squares) / size if size else 0.0
    return math.inf if math.isnan(difference) else difference


def _change(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Return the norm of the difference of two sketched models, of the weights that both have."""
    pairs = ((a, b) for name in one.keys() & other.keys() for a, b in zip(one[name][1:], other[name][1:], strict=True))
    count = max((len(values) - 1 for values in one.values()), default=1)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / count)


def _norm(weights: dict[str, list[float]]) -> float:
    return math.hypot(*(values[0] for values in weights.values()))


def data_findings(run: Run, natural: Run) -> Iterator[Finding]:
    """Compare what a run reads, and its learning rates, with the script's own single process."""
    for step in range(min(len(run), len(natural))):
        rows, expected = run.rows(step), natural.rows(step)
        if rows == expected:
            continue
        repeated = sum(count - 1 for count in rows.values()) - sum(count - 1 for count in expected.values())
        if rows.total() != expected.total():
            text = f"{rows.total()} rows in a step, one process has {expected.total()}"
        elif repeated > 0:
            text = f"{repeated} of {rows.total()} rows are read twice, as {repeated} others are not"
        else:
            text = f"{(rows - expected).total()} of {rows.total()} rows are others than in one process"
            hint = (
                "the order depends on the number of processes (a generator with a seed, or use_seedable_sampler=True)"
            )
            text += "" if step else f"; {hint}"
        yield Finding("rows", step + 1, text)
        break
    if len(run) != len(natural):
        text = f"it ends after {len(run)} steps of these rows, one process after {len(natural)}"
        yield Finding("rows", min(len(run), len(natural)) + 1, text)
    for step, (rates, expected) in enumerate(zip(run.rates, natural.rates, strict=False)):
        if len(rates) != len(expected) or any(relative(*pair) > LEAST for pair in zip(rates, expected, strict=True)):
            text = f"{_numbers(rates)}, in one process {_numbers(expected)}: the schedule counts batches, or is stepped"
            text += " by each process (as Accelerate's is), so it depends on the number of processes"
            yield Finding("learning rate", step + 1, text)
            break


def findings(
    run: Run, expected: str, reference: Run, differences: Differences, rounding: Differences
) -> Iterator[Finding]:
    """Compare a run with a single process that read the same rows at the same learning rates.

    Args:
        expected: the strategy that was asked for.
        differences: between the two.
        rounding: differences of the reference with the same rows in another order.
    """
    seen = {record["strategy"] for rank in run.ranks for record in rank[:1]}
    if seen - {expected}:
        yield Finding("strategy", 1, f"the script trained under {', '.join(sorted(seen))}, not under {expected}")
    ours, theirs = run.ranks[0][0]["weights"].keys(), reference.ranks[0][0]["weights"].keys()
    if ours != theirs:
        names = sorted(ours ^ theirs)
        yield Finding("trained weights", 1, f"{len(names)} are trained in one of the two alone, {names[0]} the first")
    starts, others = run.ranks[0][0]["start"], reference.ranks[0][0]["start"]
    apart = {name: distance(starts[name], others[name]) for name in starts.keys() & others.keys()}
    worst = max(apart, key=apart.__getitem__, default="")
    if not apart.get(worst, 0.0) <= LEAST:
        text = f"{apart[worst]:.1e} of {worst} away, relative, before any update: made, loaded or rounded otherwise"
        yield Finding("start", 1, text)
    if clipping := next(filter(None, map(_clipping, count(1), run.ranks[0], reference.ranks[0])), None):
        yield clipping
    yield from _numeric_findings(run, reference, differences, rounding)
    for step in range(len(run)):
        weights = [rank[step]["weights"] for rank in run.ranks]
        apart = [name for name in weights[0] if any(other.get(name) != weights[0][name] for other in weights[1:])]
        if apart:
            text = f"{len(apart)} weights are not the same on all of them, {apart[0]} the first: they train apart"
            yield Finding("ranks", step + 1, text)
            break


def _numeric_findings(run: Run, reference: Run, differences: Differences, rounding: Differences) -> Iterator[Finding]:
    """Find the first step of each kind whose difference rounding does not explain; see `findings`."""
    is_apart = False
    for kind in ("loss", "gradients", "norm", "weights", "update"):
        if kind == "update" and is_apart:
            return  # what is wrong is said
        values, places = differences.values.get(kind, []), differences.places.get(kind, [])
        for step, (value, place) in enumerate(zip(values, places, strict=True)):
            bound = max(rounding.bound(kind, step), LEAST_UPDATE if kind == "update" else 0.0)
            if not value <= bound:
                is_apart, of = True, f" of {place}" if place else " of the change since the start" * (kind == "update")
                why = _cause_of_loss(run, reference, step) if kind == "loss" else ""
                text = f"{value:.1e}{of} away, relative; rounding explains {bound:.1e}{why}"
                yield Finding("weights" if kind == "update" else kind, step + 1, text)
                break


def _clipping(step: int, record: Record, other: Record) -> Finding | None:
    """Find gradients that are clipped to another norm than in one process."""
    limits = [one["clip"] or math.inf for one in (record, other)]
    if limits[0] == limits[1] or not max(one["norm"] or 0.0 for one in (record, other)) > min(limits):
        return None
    told = ["not clipped" if limit == math.inf else f"clipped to a norm of {limit:g}" for limit in limits]
    hint = ""
    if record["strategy"].startswith("zero"):
        hint = "; DeepSpeed clips to gradient_clipping of its file alone, for which Accelerate takes 1 if it is auto"
    return Finding("norm", step, f"gradients are {told[0]}, in one process {told[1]}{hint}")


def _cause_of_loss(run: Run, reference: Run, step: int) -> str:
    loss, expected, world = run.loss(step), reference.loss(step), len(run.ranks)
    if any(relative(other, expected) < 0.01 * relative(loss, expected) for other in run.losses_by_labels(step)):
        return "; each batch is divided by its own number of labels: a mean of means, not of all labels of the step"
    for factor in {world, 1 / world} if world > 1 else ():
        if relative(loss, factor * expected) < 0.01 * abs(factor - 1):
            return f"; it is {factor:g} times that of one process: summed, or divided, once too often over processes"
    return ""


def own_findings(run: Run) -> Iterator[Finding]:
    """Judge a run by itself: what it trains, and on which tokens."""
    if problem := mask_problem([row for record in run.ranks[0] for row in record["masks"]]):
        yield Finding("labels", 1, problem)
    value, text = run.ranks[0][0]["apart"]
    if value:
        yield Finding("context", 1, f"{text}: padding, or what stands beside it, changes what it means")
    yield from weight_findings(run)


def weight_findings(run: Run) -> Iterator[Finding]:
    """Compare weights that are trained, and those that are not, with what moves."""
    first, last = run.ranks[0][0], run.ranks[0][-1]
    start, end = first["start"], last["end"]
    frozen = (name for name in end if name in start and name not in last["weights"])
    moved = [name for name in frozen if distance(start[name], end[name]) > LEAST]
    if moved:
        text = f"{len(moved)} weights move that are not trained, {moved[0]} the first"
        yield Finding("frozen weights", len(run), text)
    has_gradient = {name for record in run.ranks[0] for name, values in record["gradients"].items() if values[0]}
    idle = [name for name, values in last["weights"].items() if name in has_gradient and start.get(name) == values]
    if idle and len(idle) < len(last["weights"]):
        text = f"{len(idle)} weights have gradients and do not move, {idle[0]} the first"
        text += ": no optimizer has them, or rounding undoes it"
        yield Finding("trained weights", 1, text)


def logged_findings(run: Run, reference: Run, rounding: Differences) -> Iterator[Finding]:
    """Compare what was logged of evaluations, in its order."""
    step = len(run) - 1
    bound = max(rounding.bound("loss", step), rounding.bound("weights", step))
    measured, expected = _evaluations(run), _evaluations(reference)
    if [log.keys() for log in measured] != [log.keys() for log in expected]:
        text = f"{len(measured)} evaluations, in one process {len(expected)}, or other names of what they measure"
        yield Finding("logged", len(run), text)
        return
    for ours, theirs in zip(measured, expected, strict=True):
        for name in ours:
            if not relative(ours[name], theirs[name]) <= bound:
                text = f"{name} is {ours[name]:.6g}, in one process {theirs[name]:.6g}; rounding explains {bound:.1e}"
                yield Finding("logged", len(run), f"{text}: batches have the same weight, or rows count twice")
                return


def _evaluations(run: Run) -> list[dict[str, float]]:
    """Return what is logged of each evaluation, without times."""
    begin, end = ("eval", "val", "test"), ("_runtime", "_per_second")
    logs = (
        {name: value for name, value in log.items() if name.startswith(begin) and not name.endswith(end)}
        for log in run.values("log")
    )
    return [log for log in logs if log]


def why_nothing_is_shown(reference: Run) -> str:
    """Return why agreement with this run would show nothing; "" if it does."""
    records = reference.ranks[0]
    if hidden := [step for step in range(len(records)) if not reference.rows(step)]:
        return f"no row can be seen in step {hidden[0] + 1}: neither in the model's inputs nor by its place in the data"
    norm = max((math.hypot(*(values[0] for values in record["gradients"].values())) for record in records), default=0)
    if norm < LEAST_NORM:
        return f"all gradients are below {LEAST_NORM:g}: this model learns nothing, and any strategy agrees with it"
    if all(records[0]["start"].get(name) == values for name, values in records[-1]["weights"].items()):
        return "no weight moves: each learning rate is 0, or the optimizer has other weights than the model"
    start, weights = records[0]["start"], records[-1]["weights"]
    if _change(weights, start) <= LEAST * _norm(weights):
        return f"the weights move by less than {LEAST:g} of their norm, which fp32 rounds: raise the learning rate"
    return ""


def relative(one: float, other: float) -> float:
    size = max(abs(one), abs(other))
    return abs(one - other) / size if size else 0.0 if one == other else math.inf


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
