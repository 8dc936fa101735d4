"""The examination of the host that this process runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.doctor import findings, host, host_checks, shared_folder
from samecurve.doctor.findings import Finding
from samecurve.doctor.host import HostFacts

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.strategy.plan import Strategy


def look(
    recipe: Recipe | None, strategy: Strategy | None, needed_bytes: Mapping[str, int]
) -> tuple[HostFacts, list[Finding]]:
    """Return the host's facts and what is found from them.

    Args:
        needed_bytes: purpose of a folder (see `host_checks.folders`) to the bytes that the run will write there.
    """
    facts = host.facts(host_checks.folders(recipe, strategy))
    return facts, list(host_checks.check_host(facts, needed_bytes, recipe, strategy))


def one_host(recipe: Recipe | None, strategy: Strategy | None, needed_bytes: Mapping[str, int]) -> list[Finding]:
    """Examine this host alone, its output folder included."""
    _, results = look(recipe, strategy, needed_bytes)
    return [*results, shared_folder.alone(Path(recipe.output_dir))] if recipe else results


def report(results: list[Finding], json_file: str | None) -> int:
    """Print the findings and return the exit code.

    Args:
        json_file: also write them as JSON; "-" for standard output and nothing else.
    """
    if json_file:
        findings.write_json(results, json_file)
    if json_file != "-":
        print(findings.text(results), flush=True)
    return findings.exit_code(results)
