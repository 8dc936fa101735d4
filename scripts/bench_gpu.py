"""What scripts/bench_gpu.sh runs: the cases of benchmarks/gpu/ one after the other, each kept at once."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import attention_table, runs  # noqa: E402
from benchmarks.gpu.cases import GROUPS, PACKED, Case, cases, chosen  # noqa: E402
from benchmarks.gpu.page import page  # noqa: E402
from benchmarks.machine import commit, said  # noqa: E402
from samecurve.distributed.cpu_workers import num_cores  # noqa: E402
from samecurve.specs.environment import versions  # noqa: E402
from samecurve.storage.atomic import read_json, utc_timestamp, write_json, write_text  # noqa: E402

SHORTEST_SECONDS = 45.0
"""A case is not begun where less than this is left of --minutes, or than another case of the same model took."""
DRIVER = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
PROBE = """
import json, torch
count = torch.cuda.device_count()
one = torch.cuda.get_device_properties(0) if count else None
print(json.dumps({"num_devices": count, "device": one and one.name, "memory_gib": one and one.total_memory / 2**30}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    folder = (arguments.folder or ROOT / "runs" / ("bench_gpu_toy" if arguments.toy else "bench_gpu")).resolve()
    home = folder if arguments.toy else ROOT / "benchmarks" / "gpu"
    results = (arguments.results or home / "results.json").resolve()
    output = (arguments.output or (folder / "gpu.md" if arguments.toy else home.with_suffix(".md"))).resolve()
    os.chdir(ROOT)  # strategies are named from there
    facts = machine(arguments.toy)
    among = cases(facts["num_devices"], arguments.toy)
    wanted = chosen(among, arguments.only)
    kept = Kept(results, output, facts)
    if arguments.list:
        for case in wanted:
            print(f"{case.group:9} {case.name:70} {kept.state(case)}".rstrip())
        return 0
    if not facts["num_devices"]:
        sys.exit("error: there is no GPU here; --toy rehearses the same cases at a toy size on a CPU")
    folder.mkdir(parents=True, exist_ok=True)
    todo = [case for case in wanted if arguments.again or not kept.is_there(case)]
    print(f"{len(wanted)} cases, of which {len(wanted) - len(todo)} are there already ({results})", flush=True)
    measure_cases(todo, kept, runs.Places(folder, arguments.toy), arguments.limit, 60 * arguments.minutes)
    print(f"{results}, {output}")
    return 0


def measure_cases(todo: Sequence[Case], kept: Kept, places: runs.Places, limit: float, seconds: float) -> None:
    """seconds: for all of them together; what does not fit into them is left for the next start."""
    end, num_left = time.perf_counter() + seconds, 0
    for index, case in enumerate(todo):
        left, own_limit = end - time.perf_counter(), max(limit, case.seconds)
        if left < min(own_limit, kept.longest(case)):
            num_left += 1
            continue
        print(f"{case.name} ({index + 1} of {len(todo)})", flush=True)
        row = runs.measure(case, places, min(own_limit, left))
        if row["state"] == "time limit" and left < own_limit:
            print(f"{case.name}: cut off by --minutes; the same command measures it anew")
            num_left += 1
            continue
        kept.add(case, row)
        print(f"    {_told(row)}", flush=True)
    if num_left:
        print(f"--minutes are over: {num_left} cases are left; run the same command to continue")


def _parser() -> argparse.ArgumentParser:
    groups = "; ".join(f"{name}: {what}" for name, what in GROUPS.items())
    parser = argparse.ArgumentParser(prog="scripts/bench_gpu.sh", description=f"groups: {groups}")
    parser.add_argument("--list", action="store_true", help="the cases, and what is known of each")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help="cases, groups or models (llama_8b); default: all"
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there already")
    limit = "seconds for one case, its start included (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=300.0, help=limit)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing new after that, and end what runs")
    parser.add_argument("--toy", action="store_true", help="a toy model, on a CPU where there is no GPU")
    parser.add_argument("--folder", type=Path, help="of runs, model folder and caches; default: runs/bench_gpu")
    parser.add_argument("--results", type=Path, help="default: benchmarks/gpu/results.json")
    parser.add_argument("--output", type=Path, help="the page; default: benchmarks/gpu.md")
    return parser


class Kept:
    """results.json, and the page that is made of it: what other machines measured stays."""

    def __init__(self, results: Path, output: Path, facts: dict):
        self._results, self._output, self._facts = results, output, facts
        self._content = read_json(results)
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
            write_json(attention_table.PATH, read_json(attention_table.PATH) | attention_table.table(self._content))

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


def _told(row: dict) -> str:
    if row["state"] != "done":
        return f"{row['state']}: {row['reason']}"
    rate = f"{row['tokens_per_second']:,.0f} tokens/s, " if "tokens_per_second" in row else ""
    return f"{rate}{row['seconds']:.0f} s in all"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a run's processes end with it
    sys.exit(main())
