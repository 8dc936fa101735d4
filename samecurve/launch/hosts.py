"""The hosts of a job: a hostfile, a hosts.yaml, or a number of nodes; and the slots that are left of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.config.documents import Document, describe, format_problems, read_document, suggest, why_unreadable
from samecurve.errors import ConfigurationError

KEYS = ("hosts", "gpus_per_node", "port")
PORT = 29500
_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>0*[1-9]\d*))?")
_DEEPSPEED_LINE = re.compile(r"\S+\s+slots=\d+")


@dataclass(frozen=True)
class HostSlots:
    """A machine: its name or address, and the number of processes on it."""

    name: str
    slots: int


def read_hostfile(path: str, for_deepspeed: bool = False) -> list[HostSlots]:
    """Read a hostfile: a name and slots=N per line, # for comments. Without slots a host has one.

    Args:
        for_deepspeed: whether the deepspeed launcher will read it, too, which demands the slots.

    Raises:
        ConfigurationError: it cannot be read, is empty, or has a line of another form; all lines are reported.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hostfile {path}: {why_unreadable(error)}") from error
    hosts, problems = [], []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        match = _LINE.fullmatch(content)
        if match and for_deepspeed and not _DEEPSPEED_LINE.fullmatch(content):
            text = f"found {content!r}, but the deepspeed launcher reads only NAME slots=N, without spaces around ="
            problems.append(f"{path}:{number}: {text}")
        elif match and (problem := name_problem(match["host"])):
            problems.append(f"{path}:{number}: {problem}")
        elif match:
            hosts.append(HostSlots(match["host"], int(match["slots"] or 1)))
        elif content:
            problems.append(f"{path}:{number}: found {content!r}, expected NAME slots=N with N above 0")
    problems += [f"{path}: {name} is listed twice; remove one" for name in _twice([host.name for host in hosts])]
    if problems or not hosts:
        raise ConfigurationError("\n".join(problems) or f"{path}: no host listed; write a line NAME slots=N for each")
    return hosts


def read_hosts(path: str) -> tuple[list[HostSlots], int]:
    """Read a hosts.yaml: `hosts`, a list of names; `gpus_per_node`; and `port`, by default 29500.

    Returns:
        The hosts, and the port at which the first one waits for the others.

    Raises:
        ConfigurationError: reports every problem of the file.
    """
    document = read_document(path)
    for key in document.content.keys() - set(KEYS):
        document.problem((key,), "unknown key" + suggest((key,), ((known,) for known in KEYS)))
    names = document.content.get("hosts")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        value = "missing" if names is None else f"found {describe(names)}"
        document.problem(("hosts",), f"{value}, expected a list of names or addresses, such as [10.0.0.1, 10.0.0.2]")
        names = []
    for name in names:
        if problem := name_problem(name):
            document.problem(("hosts",), problem)
    for name in _twice(names):
        document.problem(("hosts",), f"{name} is listed twice; remove one")
    slots = _whole(document, "gpus_per_node", None, 1, 1 << 16)
    port = _whole(document, "port", PORT, 1, 65535)
    if document.problems:
        raise ConfigurationError(format_problems(document.problems))
    return [HostSlots(name, slots) for name in names], port


def name_problem(name: str) -> str:
    """Say why a text is no name of a host, "" if it is one: names go into scripts and to ssh, which has options."""
    if re.fullmatch(r"(?!-)[A-Za-z0-9_.:-]+", name):
        return ""
    return f"found {name!r}, but the name of a host has letters, digits and _ . : - and does not begin with -"


def _whole(document: Document, key: str, default: int | None, least: int, most: int) -> int:
    value = document.content.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = "missing" if value is None else f"found {describe(value)}"
        document.problem((key,), f"{shown}, expected a whole number from {least} to {most}")
        return least
    return value


def _twice(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def select(hosts: Sequence[HostSlots], include: str | None, exclude: str | None) -> list[HostSlots]:
    """Return the hosts, in their order, with the number of slots that a filter of the deepspeed launcher leaves.

    Args:
        include, exclude: `NAME[:SLOT,...]` joined by `@`; without slots, all of the host.

    Raises:
        ConfigurationError: names a host or a slot that is not there, or leaves nothing.
    """
    option, text = ("--include", include) if include else ("--exclude", exclude or "")
    if include and exclude:
        raise ConfigurationError("--include and --exclude: found both; give one of them")
    if not text:
        return list(hosts)
    slots = {host.name: set(range(host.slots)) for host in hosts}
    named: dict[str, set[int]] = {name: set() for name in slots}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in slots:
            raise ConfigurationError(f"{option} {text}: no host {name!r}; the hosts are {', '.join(slots)}")
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise ConfigurationError(
                f"{option} {text}: found {part!r}, expected NAME or NAME:SLOT,SLOT such as {name}:0,1"
            )
        chosen = {int(number) for number in numbers.split(",")} if colon else slots[name]
        if chosen - slots[name]:
            above = f"{name} has {len(slots[name])} slots, numbered from 0"
            raise ConfigurationError(f"{option} {text}: no slot {max(chosen)} on {name}; {above}")
        named[name] |= chosen
    left = {name: named[name] if include else slots[name] - named[name] for name in slots}
    selected = [HostSlots(name, len(kept)) for name, kept in left.items() if kept]
    if not selected:
        raise ConfigurationError(f"{option} {text}: no slot is left")
    return selected
