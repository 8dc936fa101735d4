"""options_probe.py with Triton's interpreter. A case with Liger's kernels changes the process: plain ones go first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import interpreted  # noqa: E402  before anything that imports Triton
import options_probe  # noqa: E402

from samecurve.run import lifecycle  # noqa: E402


def main() -> None:
    interpreted.prepare()
    options_probe.main()


if __name__ == "__main__":
    lifecycle.end_with(main)
