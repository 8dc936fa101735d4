"""What an option costs and saves, as pages: keys of the strategy's files, kinds of activation checkpointing, and how
attention, the loss and the layers are computed.

    python scripts/bench_options.py sharding|activations|kernels [--rounds 3] [--steps 12] [--output FILE]

Each table is one `python -m samecurve bench step`: the recipe as it is and each variant take turns, in processes of
their own, and a ratio is to the recipe as it is in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import commit  # noqa: E402
from benchmarks.options import PAGES, RECIPE, WARM_UP, Began, Table, heading, shown  # noqa: E402
from samecurve.distributed.affinity import share_of_cores  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    page = PAGES[arguments.page]
    began = Began(os.getloadavg()[0], commit(*(f"benchmarks/{name}.md" for name in PAGES)))
    with tempfile.TemporaryDirectory() as folder:
        found = [measured(table, arguments, Path(folder) / table.strategy) for table in page.tables]
    output = arguments.output or ROOT / "benchmarks" / f"{arguments.page}.md"
    typed = f"{arguments.page} --rounds {arguments.rounds} --steps {arguments.steps}"
    parts = [heading(page, typed, found[0], began), *map(shown, found)]
    output.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{output}")


def measured(table: Table, arguments: argparse.Namespace, folder: Path) -> dict:
    """What `bench step --json` wrote. Raises CalledProcessError."""
    options = ["--options", "none", "--strategy", table.strategy, "--num_processes", str(table.processes)]
    options += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps), "--warmup_steps", str(WARM_UP)]
    options += [word for variant in table.variants for word in ("--variant", variant)]
    command = [sys.executable, "-m", "samecurve", "bench", "step", RECIPE, *table.overrides, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(share_of_cores(table.processes))}
    folder.mkdir()
    command += ["--output", str(folder / "runs"), "--json", str(folder / "found.json")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return json.loads((folder / "found.json").read_text())


if __name__ == "__main__":
    main()
