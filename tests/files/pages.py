"""The documentation as the tests read it: README.md, CONTRIBUTING.md, SECURITY.md and the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")}
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    return PAGES[name].read_text()


def blocks(name: str) -> list[str]:
    return _BLOCK.findall(text(name))


def prose(name: str) -> str:
    """A page without its code blocks."""
    return _BLOCK.sub("", text(name))


def section(name: str, title: str) -> str:
    """What stands below a heading of the second level."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text(name), re.MULTILINE | re.DOTALL)[1]


def tables(markdown: str) -> list[list[list[str]]]:
    """The tables of a text: rows of cells, without header."""
    found = re.findall(r"(?:^\|.*\|\n)+", f"{markdown}\n", re.MULTILINE)
    return [[_cells(line) for line in table.splitlines()[2:]] for table in found]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def names(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(markdown: str) -> set[str]:
    """Of every heading, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
