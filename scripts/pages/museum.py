"""Write docs/museum.md: `python -m scripts.pages.museum > docs/museum.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.museum.exhibit import Exhibit
from tests.museum.exhibits import EXHIBITS, NOT_SHOWN

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "museum.json"
_HEAD = """# The museum of wrong training

<!-- Written by `python -m scripts.pages.museum` from tests/museum/ and benchmarks/museum.json. Do not edit. -->

Forty public reports of wrong or lost training, planted again by a few lines in small scripts, and what
[`prove`](proving.md#a-script) says of each first. An exhibit counts as caught if its first finding is of the kind that
the cause has; of its counterpart, where these lines are right, `prove` must find nothing.

**{caught} of 40 are caught in the right place. {alarms} of {clean} counterparts gave an alarm**; they are {different}
different scripts. {missing} reports are [not shown](#not-shown). Measured until {date}{at}
on {cores} cores without a GPU, with torch {torch}, transformers {transformers}, accelerate {accelerate}, deepspeed
{deepspeed}. The plants are close to the reports' causes, and yet plants: a report's own code may fail in further ways.

`python -m tests.museum.judged` judges them anew, and `python -m tests.museum.judged "mean of means"` one of them.
"""


def render_page() -> str:
    """Return the text of docs/museum.md."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    of_both = [results["exhibits"].get(exhibit.name, {}) for exhibit in EXHIBITS]
    right = [both["right"] for both in of_both if "right" in both]
    commits = sorted({result.get("commit", "") for both in of_both for result in both.values()})
    facts = {
        "caught": sum(both.get("wrong", {}).get("as_expected", False) for both in of_both),
        "alarms": sum(not result["as_expected"] for result in right),
        "clean": len(right),
        "different": len({result["sha256"] for result in right}),
        "missing": len(NOT_SHOWN),
        "date": results["date"],
        "at": f" at {', '.join(commits)}" if all(commits) else "",
        "cores": results["cores"],
        **results["versions"],
    }
    pairs = sorted(zip(EXHIBITS, of_both, strict=True), key=lambda pair: pair[0].number)
    lines = [f"| {number} | {reports} | {reason} |" for number, (reports, reason) in sorted(NOT_SHOWN.items())]
    table = "\n".join(["## Not shown", "", "| | reports | why |", "|---|---|---|", *lines]) + "\n"
    return "\n".join([_HEAD.format(**facts), *(_exhibit(*pair) for pair in pairs), table])


def _exhibit(exhibit: Exhibit, both: dict[str, Any]) -> str:
    wrong = both.get("wrong", {})
    lines = [f"## {exhibit.number}. {exhibit.name}", "", f"{exhibit.reports}", ""]
    lines += [f"- Symptom: {exhibit.symptom}.", f"- Cause: {exhibit.cause}."]
    if not wrong.get("as_expected"):
        lines.append(f"- **Not caught**: the first finding has to be of {exhibit.kind}.")
    if wrong.get("kind"):
        place = f"`{exhibit.script}.py` under `{exhibit.strategy}`"
        lines += [f"- `prove` says of {place}:", "", "```", f"{wrong['kind']}: {wrong['text']}", "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_page(), end="")
