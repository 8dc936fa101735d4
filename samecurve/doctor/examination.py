"""The examination of the host that this process runs on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.doctor import findings, host, host_checks, shared_folder
from samecurve.doctor.findings import Finding, failed
from samecurve.doctor.host import HostFacts
from samecurve.errors import ConfigurationError, TopologyError
from samecurve.launch import ssh
from samecurve.launch.hosts import HostSlots

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.strategy.plan import Strategy


def look(
    recipe: Recipe | None, strategy: Strategy | None, needed_bytes: Mapping[str, tuple[int, int]]
) -> tuple[HostFacts, list[Finding]]:
    """Return the host's facts and what is found from them.

    Args:
        needed_bytes: purpose of a folder (see `host_checks.folders`) to the bytes that the run will write there, at
            least and at most.
    """
    facts = host.facts(host_checks.folders(recipe, strategy))
    return facts, list(host_checks.check_host(facts, needed_bytes, recipe, strategy))


def one_host(
    recipe: Recipe | None, strategy: Strategy | None, needed_bytes: Mapping[str, tuple[int, int]]
) -> list[Finding]:
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


_MORE_SECONDS = 240  # beside the limits of the stages: imports from a cold network disk


def examine(
    hosts: Sequence[HostSlots], arguments: Sequence[str], master: str | None, port: int, seconds: float
) -> list[Finding]:
    """Start the doctor on every host that ssh reaches, one process each, and return what they found together.

    Args:
        arguments: of `python -m samecurve doctor` on each host.
        master: the address of the first host for the others; None for its name.
        seconds: limit of each of its stages.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        reached = list(pool.map(_reach, hosts))
        good = [host for host, finding in zip(hosts, reached, strict=True) if not finding.exit_code]
        if not good:
            return reached
        meeting = {"WORLD_SIZE": len(good), "MASTER_ADDR": master or good[0].name, "MASTER_PORT": port}
        worlds = [{"RANK": rank, **meeting} for rank in range(len(good))]
        # a thread for each host, because each doctor waits for all the others
        outputs = list(pool.map(lambda host, world: _start(host, world, arguments, seconds), good, worlds))
    return [*reached, *(finding for output in outputs for finding in output)]


def _reach(host: HostSlots) -> Finding:
    trouble = ssh.trouble(host.name)
    if trouble:
        return failed("ssh", trouble.seen or host.name, trouble.problem, trouble.fix, trouble.kind, host.name)
    return Finding("ssh", "logs in without a password", host=host.name)


def _start(host: HostSlots, world: Mapping[str, object], arguments: Sequence[str], seconds: float) -> list[Finding]:
    """Run `doctor` as the only process of a host. world: RANK and how to meet the other hosts."""
    variables = {**ssh.forwarded(), **world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    # _reach has found this Python at the same path there
    command = [sys.executable, "-m", "samecurve", "doctor", *arguments, "--json", "-"]
    limit = 8 * seconds + _MORE_SECONDS
    try:
        done = ssh.run(host.name, f"cd {shlex.quote(str(ssh.ROOT))} && {shlex.join(command)}", limit, variables)
        findings = json.loads(done.stdout.splitlines()[-1])["findings"]  # behind what libraries print
        # `level` is for readers; a Finding derives it.
        return [Finding(**{name: value for name, value in finding.items() if name != "level"}) for finding in findings]
    except subprocess.TimeoutExpired:
        problem = f"doctor did not end within {limit:.0f} s"
        return [failed("doctor", f"rank {world['RANK']}", problem, "", TopologyError, host.name)]
    except (ValueError, LookupError, TypeError):  # no last line, no JSON, or some of another program
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        return [failed("doctor", said, "doctor failed there", f"run it on {host.name}", ConfigurationError, host.name)]
