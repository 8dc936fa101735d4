"""The tables of scripts/bench_options.py as a page."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.markdown import table
from benchmarks.options.tables import WARM_UP, Page

COLUMNS = "", "seconds a step", "tokens/s", "ratio", "lowest and highest", "peak GiB", "less", "loss differs by"


@dataclass(frozen=True)
class Began:
    """Before anything was started. load: the machine's load average."""

    load: float
    commit: str | None


def heading(page: Page, arguments: str, found: dict, began: Began) -> str:
    """arguments: of the script, as they were typed. found: the page's first table, from `bench step --json`."""
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items() if version)
    hardware = f"{found['device']}, {found['cores']} cores, commit {began.commit}"
    return f"""# {page.title}

Measured on {found["date"][:10]} by `python scripts/bench_options.py {arguments}`: {hardware};
{versions}.
Load average before it began: {began.load:.1f}; a machine that does something else besides gives no speeds to rely on.

{page.text}

The first {WARM_UP} steps are not counted. A ratio is of tokens/s to the recipe as it is in the same round: the median,
the lowest and the highest. The loss is compared at every step."""


def shown(found: dict) -> str:
    base = found["variants"][0]["peak_memory_gib"]
    rows = []
    for each in found["variants"]:
        name = each["variant"]["name"]
        cells = [
            name if each is found["variants"][0] else f"`{name}`",
            f"{each['step_seconds']:.2f}",
            f"{each['tokens_per_second']:,.0f}",
            f"{each['ratio']:.2f}",
            f"{each['lowest']:.2f} to {each['highest']:.2f}",
            f"{each['peak_memory_gib']:.2f}",
            f"{base - each['peak_memory_gib']:.2f}",
            "a loss is missing" if each["loss_difference"] is None else f"{each['loss_difference']:.1e}",
        ]
        rows.append(cells)
    lines = [f"`{name}` did not run: {reason}" for name, reason in found["not_measured"].items()]
    return "\n\n".join([f"## `{found['strategy']}`", table(COLUMNS, rows), *lines])
