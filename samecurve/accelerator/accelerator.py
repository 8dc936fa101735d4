"""`samecurve.Accelerator`: Accelerate's class, under which a step is the same on any number of processes."""

from __future__ import annotations

import accelerate


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator with the same names and signatures."""
