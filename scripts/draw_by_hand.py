#!/usr/bin/env python3
"""Draw the pictures of docs/by_hand.md, which examples/by_hand_pictures.py describes.

python scripts/draw_by_hand.py        # writes docs/by_hand.svg and docs/by_hand_schedules.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from by_hand_pictures import holdings, schedules  # noqa: E402

PICTURES = {"docs/by_hand.svg": holdings, "docs/by_hand_schedules.svg": schedules}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (ROOT / file).write_text(draw())
        print(file)
