"""Findings of the doctor: one line for each observation, with the command that fixes a problem."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.errors import SamecurveError
from samecurve.storage.atomic import storage_errors


@dataclass(frozen=True)
class Finding:
    """One observation.

    Attributes:
        area: what was looked at, for example "clock".
        seen: what was found there.
        problem: what is wrong with it; "" if nothing is.
        fix: the command or setting that mends it.
        exit_code: of the error class that a run would end with; 0 if a run works nevertheless.
        host: the host it was found on; "" if it is about all.
    """

    area: str
    seen: str
    problem: str = ""
    fix: str = ""
    exit_code: int = 0
    host: str = ""

    @property
    def level(self) -> str:
        return "FAIL" if self.exit_code else "warn" if self.problem else "ok"


def failed(area: str, seen: str, problem: str, fix: str, error: type[SamecurveError], host: str = "") -> Finding:
    """Return a finding that would end a run with `error`.

    Args:
        area, seen, problem, fix, host: see `Finding`.
        error: class of the error, whose exit code the finding gets.
    """
    return Finding(area, seen, problem, fix, error.exit_code, host)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of the first failure, or 0."""
    return next((finding.exit_code for finding in findings if finding.exit_code), 0)


def text(findings: Sequence[Finding]) -> str:
    """Format the findings, failures last, which remain on the screen then. Hosts that agree share a line."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    several = len({finding.host for finding in findings if finding.host}) > 1
    order = ("ok", "warn", "FAIL")
    lines: list[str] = []
    for finding, hosts_of_it in sorted(hosts.items(), key=lambda item: order.index(item[0].level)):
        named = hosts_of_it if several else []
        names = ", ".join(filter(None, named)) if len(named) <= 3 else f"{len(named)} hosts"
        problem = "; ".join(filter(None, (finding.problem, finding.fix)))
        first, *others = [*finding.seen.splitlines(), *([problem] if problem else [])]
        lines.append(f"{finding.level:<5} {finding.area:<10} {names}{': ' * bool(names)}{first}")
        lines += [f"{'':17}{line}" for line in others]
    count = sum(finding.level == "FAIL" for finding in hosts)
    warnings = sum(finding.level == "warn" for finding in hosts)
    last = f"{count} problem{'s' * (count != 1)}" if count else "no problem found"
    return "\n".join([*lines, last + (f", {warnings} warning{'s' * (warnings > 1)}" if warnings else "")])


def write_json(findings: Sequence[Finding], target: str) -> None:
    """Write the findings to a file, or to standard output for "-"."""
    content: dict[str, Any] = {
        "exit_code": exit_code(findings),
        "findings": [{**asdict(finding), "level": finding.level} for finding in findings],
    }
    if target == "-":
        print(json.dumps(content))
        return
    with storage_errors(Path(target)):
        Path(target).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
