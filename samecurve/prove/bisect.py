"""Where two trainings part: the first step, the first quantity in it, the rank, and the line of code.

`prove`'s records say in which step. That step is then recorded once more, module by module.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from samecurve.bench.jobs import StrategyJob
from samecurve.prove.judge import Run, bound, distance, relative, why_nothing_is_shown
from samecurve.prove.modules import Rows
from samecurve.prove.process import Watch
from samecurve.prove.script import ALONE, Incomplete, Processes, Proof, Verdict, check
from samecurve.storage.atomic import storage_errors, write_json

# In which order one quantity makes the next.
ORDER = (
    *("strategy", "rows", "inputs", "trained weights", "weights before", "forward", "loss", "gradient"),
    *("reduction", "norm", "learning rate", "update", "weights", "ranks"),
)
# kinds of the judge's findings: gradients are seen after the reduction alone; what is no quantity of a step is left out
_OF_JUDGE = {"gradients": "reduction", "start": "weights before"} | {name: name for name in ORDER}
_CALLS = {"forward": "forward", "loss": "backward", "gradient": "backward", "reduction": "backward", "norm": "norm"}
_AGREED = {
    "weights before": "weights before the step",
    "forward": "inputs and outputs of modules",
    "loss": "loss",
    "gradient": "gradients",
    "reduction": "reduced gradients",
    "norm": "norm",
    "update": "updates",
}
_WEIGHTS = {
    "weights before": "{name}, changed {when}",
    "loss": "the loss",
    "gradient": "the gradient of {name}, before any reduction",
    "reduction": "the gradient of {name}, which is not the mean of the ranks' own",
    "norm": "the norm of gradients that agree",
    "update": "the update of {name}",
}


class Place(NamedTuple):
    """Where the runs part.

    Attributes:
        quantity: one of ORDER.
        step: counted from 1.
        rank: None if it is no single one's.
        place: a module, a weight or an input; "" for a quantity of the whole model.
        line: where it is in somebody's code.
        text: a sentence without its beginning.
    """

    quantity: str
    step: int
    rank: int | None
    place: str
    line: str
    text: str


class _Pair(NamedTuple):
    """A quantity beside that of the other run.

    Attributes:
        name: "module:side:n" of activations, the weight's of weights.
        differences: of each rank, relative.
        sizes: norms, of the rank that differs most.
    """

    quantity: str
    name: str
    differences: list[float]
    sizes: tuple[float, float]

    def ranks(self, explained: float) -> list[int]:
        return [rank for rank, difference in enumerate(self.differences) if not difference <= explained]


def run(
    script: Path, arguments: Sequence[str], job: StrategyJob | None, against: Path | None, steps: int, output: Path
) -> int:
    """Find where a strategy, or a script against another one, parts; print it, write bisect.json.

    Args:
        job: None compares one process with one of `against`.

    Returns 0 if they do not part, else 1.
    """
    check([job] if job is not None else [])
    with storage_errors(output), Processes() as processes:
        proof = Proof(processes, script, arguments, steps, output, against)
        nothing = why_nothing_is_shown(proof.own)
        verdict = proof.judge(job or replace(ALONE, name="changed"))
        is_apart = any(finding.kind in _OF_JUDGE for finding in verdict.findings)
        place = first_place(proof, verdict) if is_apart and not verdict.reason else None
        parts = bool(verdict.reason or nothing or place)
        content = {"parts": parts, **(place._asdict() if place else {"text": verdict.reason or nothing})}
        write_json(output / "bisect.json", content)
    name = f"{script} under {job.name} on {job.world_size} processes" if job else str(script)
    other = "its single process" if job else str(against)
    if place:
        rank = f", on rank {place.rank}" if place.rank is not None else ""
        text = f"{name} parts from {other} in step {place.step}{rank}: {place.text}"
    elif parts:
        text = f"{name}: {verdict.reason or f'nothing can be shown: {nothing}'}"
    else:
        text = f"{name} does not part from {other} in {steps} steps."
    print(f"\n{textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)}")
    return 1 if parts else 0


def first_place(proof: Proof, verdict: Verdict) -> Place:
    """Find where a verdict's run first differs, by recording one step again where the rows are the same."""
    kind, step, finding = min(
        ((_OF_JUDGE[part.kind], part.step, part) for part in verdict.findings if part.kind in _OF_JUDGE),
        key=lambda one: (one[1], ORDER.index(one[0])),
    )
    text = finding.text.partition(":")[0] if verdict.job.path is None else finding.text  # hints are about processes
    place = (verdict.differences.places.get(finding.kind) or [""])[step - 1 : step]
    if kind == "trained weights":
        place = sorted(verdict.run.ranks[0][0]["weights"].keys() ^ proof.own.ranks[0][0]["weights"].keys())
    known = Place(kind, step, None, ", ".join(place), "", f"{kind}: {text}.")
    if kind == "rows":
        return _of_rows(proof, verdict, known)
    if kind in ("strategy", "trained weights"):
        return known
    given, job = replace(verdict.given, detailed=step), verdict.job
    try:
        run = proof.run(replace(job, name=f"{job.name}_again"), Watch(detailed=step), proof.script)
        other = proof.run(replace(ALONE, name="single_again"), given, proof.against)
        backwards = proof.run(replace(ALONE, name="rounding_again"), replace(given, backwards=True), proof.against)
    except Incomplete:
        return known
    rounding = {pair[:2]: max(pair.differences) for pair in _pairs(backwards, other, step - 1)}
    pairs = [(pair, bound(rounding.get(pair[:2], 0.0))) for pair in _pairs(run, other, step - 1)]
    apart = [(pair, explained) for pair, explained in pairs if pair.ranks(explained)]
    if not apart or ORDER.index(apart[0][0].quantity) > ORDER.index(kind):
        return known
    (pair, explained), ranks = apart[0], apart[0][0].ranks(apart[0][1])
    if pair.quantity == "loss":  # a mean over ranks; its gradients are of one
        ranks = next((one.ranks(limit) for one, limit in apart if one.quantity == "gradient"), [])
    elif pair.quantity == "gradient" and ":" not in pair.name:
        ranks = _ranks_of_gradient(proof, run, given, pair.name)
    agreed = Counter(one.quantity for one, _ in pairs[: pairs.index(apart[0])])
    place, what = _described(pair, step)
    places = other.ranks[0][step - 1]["places"]
    line = places.get(_CALLS.get(pair.quantity, "update")) or places["update"]
    code = places.get(place) or places.get(place.rpartition(".")[0], "")  # of a module, or of a weight's
    here, there = f"under {job.name}", "in one process"
    if proof.script != proof.against:
        here, there = f"in {proof.script.name}", f"in {proof.against.name}"
    before = ", ".join(["rows, inputs", *(f"{number} {_AGREED[quantity]}" for quantity, number in agreed.items())])
    text = (
        f"{what}{code and f' ({code})'}, called at {line}. {'Its norm' if pair.name else 'It'} is {pair.sizes[0]:.7g} "
        f"{here} and {pair.sizes[1]:.7g} {there}: {max(pair.differences):.1e} apart, relative, where rounding explains "
        f"{explained:.1e}. All before it agrees: {before}."
    )
    if kind == pair.quantity == "loss":
        text += "".join(f" The loss: {cause}." for cause in finding.text.split("; ")[2:])
    return Place(pair.quantity, step, _only(ranks, run), place, line, text)


def _only(ranks: Sequence[int], run: Run) -> int | None:
    return ranks[0] if len(ranks) == 1 and len(run.ranks) > 1 else None


def _ranks_of_gradient(proof: Proof, run: Run, given: Watch, name: str) -> list[int]:
    """Return the rank whose own gradient of a weight is another than that of one process with its rows."""
    step = given.detailed - 1
    before = sum(len(record["indices"]) for record in run.ranks[0][:step])
    differences = []
    for rank, records in enumerate(run.ranks):
        replay = [*(given.replay or [])[:before], *records[step]["indices"]]
        job = replace(ALONE, name=f"rows_of_rank_{rank}")
        try:
            other = proof.run(job, replace(given, replay=replay), proof.against).ranks[0][step]
        except Incomplete:
            return []
        if Counter(other["rows"]) != Counter(records[step]["rows"]):
            return []
        share = sum(records[step]["losses"]) / sum(other["losses"])  # a rank may divide by the labels of all
        values = [share * value for value in other["local"][name]]
        differences.append(distance(records[step]["local"].get(name, [0.0] * len(values)), values))
    return [rank for rank, difference in enumerate(differences) if difference >= 0.1 * max(differences)]


def _of_rows(proof: Proof, verdict: Verdict, known: Place) -> Place:
    """Name the rank with other rows, and the inputs in which they differ if it is not all of them."""
    step, natural = known.step - 1, proof.natural[verdict.given.merged]
    expected, got = natural.rows(step), verdict.run.rows(step)
    names: Counter[str] = Counter()
    for row in got - expected:
        theirs = max(expected - got, key=lambda one: len({*one.split()} & {*row.split()}), default="")
        names.update({part.split(":")[0] for part in {*row.split()} - {*theirs.split()}})
    inputs = {part.split(":")[0] for row in got + expected for part in row.split()}
    ranks = [rank for rank, records in enumerate(verdict.run.ranks) if Counter(records[step]["rows"]) - expected]
    rank = _only(ranks, verdict.run)
    if not names or {*names} == inputs:
        return known._replace(rank=rank)
    place, count = ", ".join(sorted(names)), (got - expected).total()
    text = f"{place} of {count} rows of {got.total()}, whose other inputs are those of one process."
    return Place("inputs", known.step, rank, place, "", text)


def _pairs(run: Run, other: Run, index: int) -> Iterator[_Pair]:
    """Pair the quantities of a step in ORDER, within a quantity as the other run computed them."""
    ranks, reference = [rank[index] for rank in run.ranks], other.ranks[0][index]

    def of_activations(quantity: str, key: str) -> Iterator[_Pair]:
        for name, rows in reference[key].items():
            yield from _pair(quantity, name, [rank[key].get(name, {}) for rank in ranks], rows, _floor(rows))

    def of_weights(quantity: str, key: str, least: float = 0.0) -> Iterator[_Pair]:
        for name, values in reference[key].items():
            ones = [{name: rank[key][name]} if name in rank[key] else {} for rank in ranks]
            yield from _pair(quantity, name, ones, {name: values}, least)

    least = _floor(reference["gradients"])
    yield from of_weights("weights before", "before")
    yield from of_activations("forward", "forward")
    losses = run.loss(index), other.loss(index)
    yield _Pair("loss", "", [relative(*losses)], losses)
    yield from of_activations("gradient", "backward")
    yield from of_weights("gradient", "mean", least)
    for name in ranks[0]["mean"]:
        ones = [{name: rank["gradients"][name]} for rank in ranks if name in rank["gradients"]]
        yield from _pair("reduction", name, ones, {name: ranks[0]["mean"][name]}, least)
    if reference["norm"] is not None and all(rank["norm"] is not None for rank in ranks):
        norms = [rank["norm"] for rank in ranks]
        differences = [relative(norm, reference["norm"]) for norm in norms]
        yield _Pair("norm", "", differences, (norms[_worst(differences)], reference["norm"]))
    yield from of_weights("update", "update")


def _pair(quantity: str, name: str, ranks: Sequence[Rows], reference: Rows, least: float) -> Iterator[_Pair]:
    """Yield what ranks have of a module or weight beside the same rows of the other run, if there are any."""
    differences, sizes = [], []
    for rows in ranks:
        by_row = {
            row: distance(values, reference[row], least)
            for row, values in rows.items()
            if row in reference and len(values) == len(reference[row])
        }
        worst = max(by_row, key=by_row.__getitem__, default=None)
        differences.append(by_row[worst] if worst is not None else 0.0)
        sizes.append((rows[worst][0], reference[worst][0]) if worst is not None else (0.0, 0.0))
    if differences:
        yield _Pair(quantity, name, differences, sizes[_worst(differences)])


def _worst(differences: Sequence[float]) -> int:
    return max(range(len(differences)), key=differences.__getitem__)


def _floor(sketches: Rows) -> float:
    return 1e-3 * max((values[0] for values in sketches.values()), default=0.0)


def _described(pair: _Pair, step: int) -> tuple[str, str]:
    """Return the place of the first pair that is apart, and what it is."""
    quantity, name = pair.quantity, pair.name
    if ":" not in name:
        return name, _WEIGHTS[quantity].format(name=name, when=f"after the update of step {step - 1}" * (step > 1))
    module, side, _ = name.split(":")
    what = f"the {'' if quantity == 'forward' else 'gradient by the '}{side} of {module or 'the model'}"
    is_own = side == ("output" if quantity == "forward" else "input")
    # what a module is given is made by the code around it
    return module if is_own else module.rpartition(".")[0], what
