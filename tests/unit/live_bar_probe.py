"""Draws a live bar around a printed line, on the terminal that it is started in."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.live import Live  # noqa: E402

from samecurve.storage import terminal  # noqa: E402

terminal.set_up()
with Live(console=terminal.TextConsole(), auto_refresh=False) as live:
    live.update("first bar", refresh=True)
    print("a \x1b]0;title\x07 line")
    live.update("second bar", refresh=True)
