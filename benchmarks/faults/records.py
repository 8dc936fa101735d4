"""Counts over the records of the fault battery, one per fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def grouped(records: list[dict], key: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the values of a key in their order, and the records of each."""
    for value in sorted({record[key] for record in records}):
        yield value, [record for record in records if record[key] == value]


def most_lost(records: list[dict]) -> str:
    """Without those that nothing bounds: no checkpoint could be written at all."""
    bounded = [record for record in records if record["could_save"]]
    worst = max(bounded, key=lambda record: record["lost_steps"], default=None)
    return f"{worst['lost_steps']} ({worst['steps_while_saving']})" if worst else "-"


def equal(records: list[dict]) -> str:
    asked = [record["resumed_equal"] for record in records if record["resumed_equal"] is not None]
    return f"{sum(asked)} of {len(asked)}" if asked else "-"


def is_kill(record: dict) -> bool:
    return "SIGKILL" in record["fault"]


def count(records: list[dict], condition: Callable[[dict], bool]) -> int:
    return sum(1 for record in records if condition(record))


def when(records: list[dict], key: str = "time") -> str:
    dates = sorted(record[key][:10] for record in records)
    return f"on {dates[0]}" if dates[0] == dates[-1] else f"from {dates[0]} to {dates[-1]}"


def each(records: list[dict], key: str) -> str:
    """The values of a key, each once."""
    return "; ".join(dict.fromkeys(record[key] for record in records))
