"""What scripts/bench_gpu.sh runs: the cases of benchmarks/gpu/ one after the other, each kept at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import runs  # noqa: E402
from benchmarks.gpu.cases import GROUPS, Case, cases, chosen  # noqa: E402
from benchmarks.gpu.results import Kept, machine  # noqa: E402


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


def _told(row: dict) -> str:
    if row["state"] != "done":
        return f"{row['state']}: {row['reason']}"
    rate = f"{row['tokens_per_second']:,.0f} tokens/s, " if "tokens_per_second" in row else ""
    return f"{rate}{row['seconds']:.0f} s in all"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a run's processes end with it
    sys.exit(main())
