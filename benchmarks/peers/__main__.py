"""Judge other trainers by `prove`, and write peers.json and peers.md.

    SAMECURVE_TRL=/tmp/trl python -m benchmarks.peers [--page] [SCRIPT ...]

SCRIPT: names of files in benchmarks/peers/; all if left out. --page only writes the page anew. SAMECURVE_TRL: a folder
made by `pip install --no-deps --target /tmp/trl trl==1.16.0`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.machine import commit, description
from benchmarks.peers.page import PEERS, RESULTS, STRATEGIES, Peer, render_page
from samecurve.specs.environment import ROOT
from samecurve.storage.atomic import utc_timestamp, write_json


def certificates(peer: Peer) -> list[dict]:
    """Run `prove` on 2 processes under all strategies, with a resume, and on 3 under DDP."""
    made = []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.environ.get("SAMECURVE_TRL", "")
    for processes, strategies in ((2, STRATEGIES), (3, STRATEGIES[:1])):
        output = ROOT / "runs" / "peers" / f"{peer.script}_{processes}"
        subprocess.run(peer.command(processes, strategies, str(output)), cwd=ROOT, env=environment)
        made.append(json.loads((output / "certificate.json").read_text(encoding="utf-8")))
    return made


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"peers": {}}
    for peer in PEERS if "--page" not in sys.argv else ():
        if peer.script in sys.argv[1:] or not sys.argv[1:]:
            results["peers"][peer.script] = certificates(peer)
            origin = {"machine": f"{description()}, trl 1.16.0", "date": utc_timestamp()[:10]}
            origin["commit"] = commit("benchmarks/peers.md", "benchmarks/peers.json")
            write_json(RESULTS, results | origin)
    RESULTS.with_suffix(".md").write_text(render_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
