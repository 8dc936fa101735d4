"""Write docs/equal_curves.md, and in short docs/strategies.md: every recipe under every strategy, against one process.

    python scripts/compare_recipes.py [--recipes sft,dpo] [--strategies tp,zero3] [--steps 8] [--output FILE]

One `python -m samecurve compare` per recipe. Its result is kept in benchmarks/curves.json as soon as it is there, so
that the table can be made in pieces, a recipe or some of its strategies, and the page is written from that file. No hub
is reached: a recipe that starts from weights of the hub starts from the small model that recipes/sft.yaml makes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.curves import (  # noqa: E402
    PAGE,
    RESULTS,
    STRATEGIES,
    measure,
    merged,
    page,
    recipe_names,
    with_overview,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="", help="names in recipes/, with commas between (default: all)")
    parser.add_argument("--strategies", default="", help="names in configs/; the others' results stay (default: all)")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    known = recipe_names()
    chosen = [name for name in arguments.recipes.split(",") if name] or known
    if unknown := set(chosen) - set(known):
        parser.error(f"--recipes: no recipes/{min(unknown)}.yaml; the names are {', '.join(known)}")
    strategies = [name for name in arguments.strategies.split(",") if name]
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in chosen:
        print(f"\n{name}", flush=True)
        before = results.get(name) if strategies else None
        found = measure(name, before["steps"] if before else arguments.steps, strategies)
        results[name] = merged(before, found) if before else found
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        arguments.output.write_text(page(results), encoding="utf-8")
        STRATEGIES.write_text(with_overview(STRATEGIES.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(arguments.output)


if __name__ == "__main__":
    main()
