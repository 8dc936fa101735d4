"""The same faults against loops made of stock parts: benchmarks/stock/faults.py."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.faults.records import count, when
from benchmarks.markdown import table

# of a stock loop's case, from the best to the worst
OUTCOMES = ("same curve", "another curve", "started over", "does not start", "hung", "silently damaged")


def against_stock(stock: dict) -> str:
    cases = stock["cases"]
    loops = list(dict.fromkeys(case["loop"] for case in cases))
    faults = list(dict.fromkeys(case["fault"] for case in cases))
    found = {(case["loop"], case["fault"]): case for case in cases}
    rows = [(fault, *(outcome(found.get((loop, fault))) for loop in loops)) for fault in faults]
    known = [name for name in OUTCOMES if any(case["outcome"] == name for case in cases)]
    others = sorted({case["outcome"] for case in cases} - {*known})
    summary = [(name, *(count(cases, in_loop(loop, name)) for loop in loops)) for name in [*known, *others]]
    lost = [max((c.get("steps_lost") or 0 for c in cases if c["loop"] == loop), default=0) for loop in loops]
    summary.append(("most steps lost", *lost))
    summary.append(("run", *(when([case for case in cases if case["loop"] == loop], "date") for loop in loops)))
    settings = stock["settings"]
    note = (
        f"{settings['processes']} processes, {settings['steps']} steps, saved every {settings['save_every']}, "
        f"{settings['keep']} kept; run by `benchmarks/stock/faults.py`, whose loops say how "
        "each is configured and why. In brackets: steps lost, of starts that finished: who loads a damaged checkpoint "
        "or does not start loses fewer than who goes back to an older good one. File named: the output says which "
        "file is damaged. Swapped weights leave no good checkpoint, so refusing to start is right there."
    )
    return f"{table(('', *loops), summary)}\n\n{table(('fault', *loops), rows)}\n\n{note}"


def in_loop(loop: str, outcome_name: str) -> Callable[[dict], bool]:
    return lambda case: case["loop"] == loop and case["outcome"] == outcome_name


def outcome(case: dict | None) -> str:
    if case is None:
        return "not run"
    lost = case.get("steps_lost")  # a run that did not start again lost all, or nothing that can be counted
    text = f"{case['outcome']} ({lost})" if lost else case["outcome"]
    return f"{text}, file named" if case.get("named") else text
