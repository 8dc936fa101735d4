"""What `prove` prints and writes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from samecurve.bench.jobs import StrategyJob
from samecurve.prove.judge import why_nothing_is_shown
from samecurve.prove.script import Processes, Proof, certificate, check
from samecurve.storage.atomic import storage_errors, write_json
from samecurve.storage.terminal import aligned

_SHOWN = ("loss", "gradients", "norm", "weights")


def run(
    script: Path, arguments: Sequence[str], jobs: Sequence[StrategyJob], steps: int, resume: str | None, output: Path
) -> int:
    """Prove, print a table and what was found, write certificate.json. Returns 0 if every strategy passes, else 1."""
    check(jobs)
    with storage_errors(output), Processes() as processes:
        more = None if resume is None else shlex.split(resume)
        proof = Proof(processes, script, arguments, steps, output, resume=more)
        nothing = why_nothing_is_shown(proof.own)
        verdicts = [] if nothing else [proof.judge(job) for job in jobs]
        content = certificate(proof, verdicts, nothing)
        write_json(output / "certificate.json", content)
    print()
    for finding in proof.problems:
        print(f"FAIL in one process: {finding.kind}, step {finding.step}: {finding.text}")
    if nothing:
        print(f"FAIL: nothing can be shown: {nothing}")
    else:
        rows = [["strategy", "processes", *_SHOWN, ""]]
        for verdict in verdicts:
            largest = verdict.differences.values
            cells = [f"{max(largest[kind]):.1e}" if largest.get(kind) else "-" for kind in _SHOWN]
            answer = "PASS" if verdict.passes else "FAIL"
            rows.append([verdict.job.name, str(verdict.job.world_size), *cells, answer])
        print(aligned(rows))
        for verdict in verdicts:
            if verdict.reason:
                print(f"\n{verdict.job.name}: {verdict.reason}")
                continue
            for index, finding in enumerate(verdict.findings):
                start = "  " if index else f"{verdict.job.name}: "
                print(f"{start}{finding.kind}, step {finding.step}: {finding.text}")
    print(f"\n{output / 'certificate.json'}")
    return 0 if content["passes"] else 1
