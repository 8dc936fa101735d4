"""The table that `model.attention: auto` reads on a GPU, from the benchmark's rows."""

from __future__ import annotations

from collections.abc import Mapping

from .cases import PACKED, ROOT

PATH = ROOT / "samecurve" / "models" / "attention" / "measured.json"
LEAST_GAIN = 1.02
"""Another attention than sdpa has to be so much faster; less is noise."""


def table(results: Mapping) -> dict[str, dict]:
    """Name the fastest attention for packed documents of each device on which sdpa and another one were measured.

    results: {machine: {"facts": ..., "rows": {case: row}}}. Of two machines with the same device the last one counts.
    """
    found = {}
    for machine in results.values():
        rows = {name: machine["rows"].get(case, {}) for name, case in PACKED.items()}
        rates = {name: row["tokens_per_second"] for name, row in rows.items() if row.get("state") == "done"}
        if machine["facts"]["toy"] or "sdpa" not in rates or len(rates) < 2:
            continue
        best = max(rates, key=lambda name: rates[name])
        found[machine["facts"]["device"]] = {
            "attention": best if rates[best] >= LEAST_GAIN * rates["sdpa"] else "sdpa",
            "tokens_per_second": rates,
            "date": rows["sdpa"]["date"],
            "versions": {name: machine["facts"]["versions"].get(name) for name in ("torch", "transformers")},
        }
    return found
