"""What `prove` says of each exhibit, and of its right counterpart.

    python -m tests.museum.judged [--again] [NAME ...]

Results go to benchmarks/museum.json one by one; those that are there for the same script are kept,
also from an earlier judge: --again judges them anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks.machine import commit
from samecurve.bench.jobs import jobs
from samecurve.errors import ConfigurationError
from samecurve.prove.judge import why_nothing_is_shown
from samecurve.prove.script import Processes, Proof
from samecurve.specs.environment import ROOT, versions
from samecurve.storage.atomic import utc_timestamp, write_json
from tests.museum.exhibit import Exhibit
from tests.museum.exhibits import EXHIBITS

RESULTS = ROOT / "benchmarks" / "museum.json"


def judge(processes: Processes, exhibit: Exhibit, is_wrong: bool, folder: Path) -> list[tuple[str, str]]:
    """Return kind and text of the findings; () of a script that passes."""
    path = folder / f"{exhibit.script}.py"
    path.write_text(exhibit.source(is_wrong), encoding="utf-8")
    try:
        proof = Proof(processes, path, exhibit.arguments, exhibit.steps, folder / "proof", resume=exhibit.resume)
    except ConfigurationError as error:
        return [("ended", str(error))]
    if nothing := why_nothing_is_shown(proof.own):
        return [("nothing shown", nothing)]
    if proof.problems:
        return [(finding.kind, finding.text) for finding in proof.problems]
    verdict = proof.judge(*jobs([exhibit.strategy], 2))
    reason = [("ended", verdict.reason)] if verdict.reason else []
    return reason or [(finding.kind, finding.text) for finding in verdict.findings]


def result_of(exhibit: Exhibit, is_wrong: bool) -> dict:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        seen = judge(processes, exhibit, is_wrong, Path(folder))
    kind, text = seen[0] if seen else ("", "")
    return {
        "kind": kind,
        "text": text.partition(", see ")[0],  # the log of a folder that is gone
        "others": [kind for kind, _ in seen[1:]],
        "as_expected": kind == exhibit.kind and exhibit.text in text if is_wrong else not seen,
        "seconds": round(time.monotonic() - started, 1),
        "sha256": _hash(exhibit, is_wrong),
    }


def _hash(exhibit: Exhibit, is_wrong: bool) -> str:
    asked = (exhibit.source(is_wrong), exhibit.strategy, exhibit.arguments, exhibit.steps, exhibit.resume)
    asked += (exhibit.kind, exhibit.text) if is_wrong else ()
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="judge also what has a result")
    arguments = parser.parse_args()
    results = (
        json.loads(arguments.results.read_text(encoding="utf-8")) if arguments.results.exists() else {"exhibits": {}}
    )
    judged: dict[str, dict] = {}
    for exhibit in EXHIBITS:
        if arguments.names and exhibit.name not in arguments.names:
            continue
        of_both = results["exhibits"].setdefault(exhibit.name, {})
        for variant, is_wrong in (("right", False), ("wrong", True)):
            known = of_both.get(variant, {})
            if known.get("sha256") == _hash(exhibit, is_wrong) and not arguments.again:
                continue
            asked = _hash(exhibit, is_wrong)
            if asked not in judged:  # exhibits of one script have one right variant
                judged[asked] = result_of(exhibit, is_wrong)
            of_both[variant] = result = judged[asked]
            mark = "ok" if result["as_expected"] else "NOT AS EXPECTED"
            print(f"{exhibit.name}, {variant}: {mark}: {result['kind']}: {result['text']} ({result['seconds']} s)")
            result["commit"] = commit("benchmarks/museum.json", "docs/museum.md")
            results |= {"date": utc_timestamp()[:10], "versions": versions(), "cores": os.cpu_count()}
            write_json(arguments.results, results)
    both = [results["exhibits"].get(exhibit.name, {}) for exhibit in EXHIBITS]
    caught = sum(bool(of_both.get("wrong", {}).get("as_expected")) for of_both in both)
    alarms = sum(not of_both.get("right", {}).get("as_expected", True) for of_both in both)
    print(f"{caught} of {len(EXHIBITS)} caught in the right place, {alarms} false alarms")


if __name__ == "__main__":
    main()
