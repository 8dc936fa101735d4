"""Results of the GPU benchmark by machine: results.json, and what a machine is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import attention_table
from benchmarks.gpu.cases import PACKED, Case
from benchmarks.gpu.page import page
from benchmarks.machine import commit, said
from samecurve.distributed.affinity import num_cores
from samecurve.specs.environment import versions
from samecurve.storage.atomic import utc_timestamp, write_json, write_text
from samecurve.storage.records import read_record

SHORTEST_SECONDS = 45.0
"""A case is not begun where less than this is left of --minutes, or than another case of the same model took."""
DRIVER = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
PROBE = """
import json, torch
count = torch.cuda.device_count()
one = torch.cuda.get_device_properties(0) if count else None
print(json.dumps({"num_devices": count, "device": one and one.name, "memory_gib": one and one.total_memory / 2**30}))
"""


class Kept:
    """results.json, and the page that is made of it: what other machines measured stays."""

    def __init__(self, results: Path, output: Path, facts: dict):
        self._results, self._output, self._facts = results, output, facts
        self._content = read_record(results).value or {}
        self._machine = self._content.setdefault(_name(facts), {"facts": facts, "rows": {}})

    def state(self, case: Case) -> str:
        """Of the row that is there, "" without one, or where it was another run."""
        row = self._row(case)
        return row["state"] if row and row["definition"] == case.definition else ""

    def is_there(self, case: Case) -> bool:
        """What failed may have wanted a package that was installed since."""
        state = self.state(case)
        failed_otherwise = state == "failed" and self._row(case).get("versions") != self._facts["versions"]
        return state != "" and not failed_otherwise

    def longest(self, case: Case) -> float:
        """Seconds that a case of this model took here, its start included."""
        rows = (row for row in self._machine["rows"].values() if row["definition"]["recipe"] == case.recipe)
        return max([SHORTEST_SECONDS, *(row["seconds"] for row in rows if row["state"] == "done")])

    def add(self, case: Case, row: dict) -> None:
        row |= {key: self._facts[key] for key in ("driver", "versions")}
        row["commit"] = commit("benchmarks/gpu.md", "benchmarks/gpu/results.json")
        self._machine["rows"][case.name] = row
        for path in (self._results, self._output):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._results, self._content)
        write_text(self._output, page(self._content))
        if case.name in PACKED.values() and not self._facts["toy"]:
            known = read_record(attention_table.PATH).value or {}
            write_json(attention_table.PATH, known | attention_table.table(self._content))

    def _row(self, case: Case) -> dict:
        return self._machine["rows"].get(case.name, {})


def machine(toy: bool) -> dict:
    """Asked in a process of its own, which gives the memory back that a CUDA context holds."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode:
        sys.exit(f"error: PyTorch could not list the GPUs:\n{probe.stderr.strip()}")
    found = json.loads(probe.stdout)
    if toy and not found["num_devices"]:
        # two processes where there are more devices
        found = {"num_devices": 2, "device": "toy size on a CPU", "memory_gib": None}
    return {
        **found,
        "driver": said(*DRIVER),
        "cores": num_cores(),
        "versions": versions(),
        "date": utc_timestamp(),
        "toy": toy,
    }


def _name(facts: dict) -> str:
    """Numbers of one kind of machine with one set of versions belong together."""
    known = {name: facts["versions"].get(name) for name in ("torch", "transformers")}
    told = ", ".join(f"{name} {version}" for name, version in known.items())
    size = ", toy size" if facts["toy"] else ""
    return f"{facts['num_devices']} x {facts['device']}, {told}{size}"
