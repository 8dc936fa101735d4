"""The named examples of examples/by_hand/ in the ranks of one start, which costs more than the lessons do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import distributed as dist

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "by_hand"


def main() -> None:
    sys.path.insert(0, str(FOLDER))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        importlib.import_module(name).main()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
