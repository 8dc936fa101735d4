"""One examination: this host, or every rank of the launcher that started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.doctor import findings, host, host_checks, shared_folder, slurm
from samecurve.doctor.findings import Finding

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.strategy.plan import Strategy


def run(
    recipe: Recipe | None,
    strategy: Strategy | None,
    needed_bytes: Mapping[str, int],
    seconds: float,
    json_file: str | None,
) -> int:
    """Examine and print. Returns the exit code of the first failure.

    Args:
        needed_bytes: purpose of a folder (see `host_checks.folders`) to the bytes that the run will write there.
        seconds: limit of each stage between ranks.
        json_file: also write the findings as JSON; "-" for standard output and nothing else.
    """
    os.environ.update(slurm.variables(os.environ))
    facts = host.facts(host_checks.folders(recipe, strategy))
    own = list(host_checks.check(facts, needed_bytes, recipe, strategy))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from samecurve.doctor import ranks  # imports torch, which one host does without

        found = ranks.examine(facts, own, recipe.output_dir if recipe else None, seconds)
        if not found and json_file != "-":
            return 0
    else:
        found = [*own, shared_folder.alone(Path(recipe.output_dir))] if recipe else own
    return report(found, json_file)


def report(found: list[Finding], json_file: str | None) -> int:
    """Print the findings, or write them as JSON; return the exit code."""
    if json_file:
        findings.write_json(found, json_file)
    if json_file != "-":
        print(findings.text(found), flush=True)
    return findings.exit_code(found)
